# SPDX-License-Identifier: Apache-2.0
"""Entry: `torchrun ... -m megatron_csbp.launch path/to/Megatron-LM/pretrain_gpt.py <its arguments> --bp-size P ...`.

Runs somebody's unmodified stock script. Three names that such a script imports from `megatron.training` are rebound
first: `parse_and_validate_args` learns our flags, `gpt_config_from_args` returns our model config, and `pretrain` gets
our datasets and forward step. Without block-diffusion flags the last two do what they always did.
"""

import dataclasses
import functools
import inspect
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_USAGE = "usage: torchrun ... -m megatron_csbp.launch SCRIPT [Megatron arguments] [block-diffusion arguments]"


def main() -> None:
    """Install the runtime, rebind the three names, and run the script as `__main__`."""
    from megatron_csbp import check_mode, cpu_runtime
    from megatron_csbp.arguments import read_device
    from megatron_csbp.configuration.config_file import take_yaml_flag
    from megatron_csbp.configuration.hardware_queues import set_one_queue
    from megatron_csbp.errors import check_launcher, hush_optional_packages, user_errors

    hush_optional_packages()
    with user_errors():
        script = _script_path(sys.argv)
        check_mode.stand_in_for_launcher(sys.argv[2:])
        check_launcher(sys.argv[2:])
        queues = set_one_queue(sys.argv[2:], os.environ)
        runtime = cpu_runtime.install(read_device(sys.argv[2:]))  # type: ignore[arg-type]
        if queues is not None and runtime.device == "cuda":
            runtime = dataclasses.replace(runtime, notes=(*runtime.notes, queues))

        from megatron_csbp import megatron_compat

        megatron_compat.check_megatron_version()
        megatron_compat.ensure_dataset_helpers()
    # Stock scripts parse the command line once before ours does, and would read the file as Megatron's own format.
    yaml_path, words = take_yaml_flag(sys.argv[2:])
    rebind(runtime, yaml_path)
    sys.argv = [str(script), *words]
    sys.path.insert(0, str(script.parent))  # the script imports its neighbours
    runpy.run_path(str(script), run_name="__main__")


def _script_path(argv: list[str]) -> Path:
    """Return the script that the command line names.

    Raises:
        ValueError: there is none, or it is not a file.
    """
    if len(argv) < 2 or argv[1].startswith("-"):
        raise ValueError(f"SCRIPT is missing: the first argument must be a training script. {_USAGE}")
    script = Path(argv[1]).resolve()
    if not script.is_file():
        raise ValueError(f"SCRIPT {argv[1]} is not a file; give the path of Megatron-LM's pretrain_gpt.py. {_USAGE}")
    return script


def rebind(runtime: Any, yaml_path: Path | None = None) -> None:
    """Rebind the names that a stock script imports from `megatron.training`.

    Args:
        runtime: the device that was chosen.
        yaml_path: what `--yaml-cfg` names.
    """
    import megatron.training as training
    from megatron.training import argument_utils, arguments
    from megatron.training import training as training_module

    arguments.parse_and_validate_args = functools.partial(_parse_and_validate_args, runtime, yaml_path)
    argument_utils.gpt_config_from_args = _model_config_from_args(argument_utils.gpt_config_from_args)
    pretrain = _pretrain(training_module.pretrain)
    for module in (training, training_module):
        module.pretrain = pretrain


def _parse_and_validate_args(
    runtime: Any,
    yaml_path: Path | None = None,
    extra_args_provider: Any = None,
    ignore_unknown_args: bool = False,
    args_defaults: dict[str, Any] | None = None,
) -> Any:
    from megatron_csbp import training_setup
    from megatron_csbp.errors import user_errors

    with user_errors():
        if ignore_unknown_args:
            raise ValueError(
                "megatron_csbp.launch runs scripts that know all their arguments (ignore_unknown_args is off)."
            )
        args = training_setup.parse_and_validate_args(runtime, extra_args_provider, args_defaults, yaml_path=yaml_path)
        training_setup.end_dry_run(args)
        return args


def _model_config_from_args(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `gpt_config_from_args`."""
    from megatron_csbp import arguments, training_setup

    @functools.wraps(stock)
    def config_from_args(args: Any, *positional: Any, **keywords: Any) -> Any:
        if not arguments.is_block_diffusion(args):
            return stock(args, *positional, **keywords)
        keywords.pop("model_config_cls", None)
        return training_setup.model_config_from_args(args, *positional, **keywords)

    return config_from_args


def _pretrain(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `pretrain`: same call, but our datasets and our forward step."""

    @functools.wraps(stock)
    def pretrain(*positional: Any, **keywords: Any) -> Any:
        from megatron.training import get_args

        from megatron_csbp import arguments, training_setup
        from megatron_csbp.agreement.exchange import store_after_restart
        from megatron_csbp.agreement.failures import naming_failures
        from megatron_csbp.reporting.instruments import closing

        args = get_args()
        if not arguments.is_block_diffusion(args):
            return stock(*positional, **keywords)
        call = inspect.signature(stock).bind(*positional, **keywords)
        call.arguments["train_valid_test_dataset_provider"] = training_setup.datasets_provider(args)
        forward_step = training_setup.forward_step_from_args(args)
        call.arguments["forward_step_func"] = forward_step
        if call.arguments.get("store") is None:
            call.arguments["store"] = store_after_restart(os.environ, 60.0 * args.distributed_timeout_minutes)
        with closing(forward_step.instruments), naming_failures(os.environ, args.rank, args.world_size):
            return stock(*call.args, **call.kwargs)

    return pretrain


if __name__ == "__main__":
    from torch.distributed.elastic.multiprocessing.errors import record

    record(main)()
