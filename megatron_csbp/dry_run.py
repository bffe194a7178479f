# SPDX-License-Identifier: Apache-2.0
"""Entry: `python -m megatron_csbp.dry_run RECIPE.yaml --gpus 16 ...`: would a job start, fit, and how fast is it?

One process, without a launcher and without a GPU. Checks are those of `--csbp-dry-run`; see `tools.dry_run`.
"""

import logging
import sys
import warnings


def main() -> None:
    """Check the command line, print the plan, and leave with its exit status."""
    from megatron_csbp.errors import hush_optional_packages, user_errors
    from megatron_csbp.tools.dry_run import command

    hush_optional_packages()
    # Deprecations and defaults that Megatron tells of at each start; its refusals are exceptions.
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.training")
    if {"-h", "--help"} & set(sys.argv[1:]):
        command.parser().print_help()
        return
    with user_errors():
        command.split(sys.argv[1:])  # before Megatron is imported, which takes seconds
        from megatron_csbp import cpu_runtime

        runtime = cpu_runtime.install("cpu")
        from megatron_csbp import megatron_compat

        megatron_compat.check_megatron_version()
        megatron_compat.ensure_dataset_helpers()
        status = command.run(sys.argv[1:], runtime)
    raise SystemExit(status)


if __name__ == "__main__":
    main()
