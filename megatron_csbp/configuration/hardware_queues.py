# SPDX-License-Identifier: Apache-2.0
"""`CUDA_DEVICE_MAX_CONNECTIONS=1`, without which Megatron trains nothing with TP or CP on GPUs before Blackwell.

CUDA reads the variable when it starts in a process, so an entry sets it before anything asks for a device. What is set
already stays as it is.
"""

from argparse import ArgumentError, ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import MutableMapping, Sequence

from megatron_csbp.configuration.config_file import switches_and_values, take_yaml_flag

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
_SIZES = ("tensor-model-parallel-size", "context-parallel-size", "block-parallel-size")
# What wants several hardware queues; Megatron then asks for nothing.
_WANTS_SEVERAL = ("use-torch-fsdp2", "use-megatron-fsdp", "overlap-moe-expert-parallel-comm")
_BLACKWELL = 10


def set_one_queue(argv: Sequence[str], environ: MutableMapping[str, str]) -> str | None:
    """Set the variable if it is not set and this command line needs it. Call before anything asks for CUDA.

    Args:
        argv: the command line without the program; it may name a `--yaml-cfg` file.
        environ: the environment of this process.

    Returns:
        What was done, for the start summary; None if nothing was.
    """
    if VARIABLE in environ or not _needs_one_queue(_flags_of(argv)):
        return None
    environ[VARIABLE] = "1"
    return f"{VARIABLE} was not set; it is 1 now, which Megatron demands of TP and CP before Blackwell"


def check_one_queue(args: Namespace, capability: int, value: str | None) -> None:
    """Megatron's rule, in words that say what to do.

    Args:
        args: parsed arguments.
        capability: major compute capability of the device.
        value: the variable's, None if it is not set.

    Raises:
        ValueError: the rule is broken.
    """
    if capability >= _BLACKWELL or value == "1" or not _needs_one_queue(args):
        return
    raise ValueError(
        f"{VARIABLE} is {value or 'not set'}; with --tensor-model-parallel-size or --context-parallel-size above 1 "
        f"Megatron wants it to be 1 on GPUs before Blackwell; this one has compute capability {capability}. Say "
        f"export {VARIABLE}=1 where the ranks are started."
    )


def _needs_one_queue(args: Namespace) -> bool:
    sizes = [getattr(args, name.replace("-", "_")) or 1 for name in _SIZES]
    return max(sizes) > 1 and not any(getattr(args, name.replace("-", "_"), False) for name in _WANTS_SEVERAL)


def _flags_of(argv: Sequence[str]) -> Namespace:
    """Return the flags that matter here, from the command line and, where it says nothing, from the YAML file."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in _SIZES:
        parser.add_argument(f"--{name}", *(["--bp-size"] if name.startswith("block") else []), type=int, default=1)
    for name in _WANTS_SEVERAL:
        parser.add_argument(f"--{name}", action=BooleanOptionalAction, default=False)
    yaml_path, rest = take_yaml_flag(argv)
    if yaml_path is not None:
        known = {action.dest: action for action in parser._actions}
        by_flag = {flag.lstrip("-").replace("-", "_"): a.dest for a in known.values() for flag in a.option_strings}
        values = switches_and_values(yaml_path)
        parser.set_defaults(**{by_flag[name]: value for name, value in values.items() if name in by_flag})
    # A value that is no number is refused later, by the parser that knows all flags.
    try:
        return parser.parse_known_args([word for word in rest if word not in ("-h", "--help")])[0]
    except ArgumentError:
        return parser.parse_args([])
