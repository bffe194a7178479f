# SPDX-License-Identifier: Apache-2.0
"""Entry: `python -m megatron_csbp.generate --load CHECKPOINTS --prompt "..."`, or torchrun for tensor parallelism.

Writes behind each prompt and prints the whole text on standard output; everything else goes to standard error. Model,
tokenizer and objective are those of the checkpoint, unless a flag says otherwise.
"""

import logging
import sys
import time
import warnings

from megatron_csbp.results import print_results


def main() -> None:
    """Load the checkpoint and write."""
    from megatron_csbp import cpu_runtime
    from megatron_csbp.arguments import read_device
    from megatron_csbp.errors import user_errors
    from megatron_csbp.one_process import be_the_only_rank

    be_the_only_rank()
    # Megatron has dozens of lines about its set-up and packages that are not installed.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with user_errors():
        runtime = cpu_runtime.install(read_device(sys.argv[1:]))  # type: ignore[arg-type]

        from megatron_csbp import megatron_compat
        from megatron_csbp.generation.session import Session, parse_arguments, without_megatrons_chatter
        from megatron_csbp.generation.show import step_in_words

        megatron_compat.check_megatron_version()
        if {"-h", "--help"} & set(sys.argv):
            parse_arguments(runtime)
        with without_megatrons_chatter():
            session = Session.open(parse_arguments(runtime))

    prints = session.args.rank == 0
    detokenize = session.tokenizer.detokenize
    on_step = (lambda step: print_results([step_in_words(step, detokenize)])) if prints else None
    for prompt in session.prompts:
        started = time.monotonic()
        generated = session.write(prompt, on_step if session.args.show_steps else None)
        if prints:
            print_results([detokenize([*prompt, *generated.tokens])])
            seconds = time.monotonic() - started
            figures = f"{len(generated.tokens)} tokens in {generated.num_passes} passes, {seconds:.1f} s"
            print(f"megatron_csbp: {figures}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
