# SPDX-License-Identifier: Apache-2.0
"""Megatron's command line: its parser, and its validation with hooks around it."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

from megatron_csbp.errors import failure_in_words


def parse_and_validate_arguments(
    extra_args_provider: Callable[[ArgumentParser], ArgumentParser],
    args_defaults: dict[str, Any],
    before_checkpoint: Callable[[Namespace], object],
    before_validation: Callable[[Namespace], None],
    after_validation: Callable[[Namespace], None],
) -> Namespace:
    """Parse the command line as Megatron's `parse_and_validate_args` does, with hooks around its validation.

    Args:
        extra_args_provider: Adds flags to Megatron's parser.
        args_defaults: Values for arguments that the command line leaves at None.
        before_checkpoint: called with the parsed arguments if some are to come out of a checkpoint: the place to see
            whether it can be read. Megatron leaves with status 0 where it cannot.
        before_validation: called with the parsed arguments; what it changes, Megatron validates.
        after_validation: called with the validated arguments, after Megatron has built tokenizer, timers, writers and
            the calculator of batch sizes, whose schedule counts tokens by `args.seq_length`.

    Returns:
        The arguments, which are also Megatron's global ones.
    """
    from megatron.training import arguments, global_vars

    args: Namespace = arguments.parse_args(extra_args_provider)
    if args.use_checkpoint_args or args_defaults.get("use_checkpoint_args", False):
        from megatron.training import checkpointing

        if args.load is None and args.pretrained_checkpoint is None:
            raise ValueError("--use-checkpoint-args needs --load or --pretrained-checkpoint with a checkpoint folder.")
        before_checkpoint(args)
        checkpointing.load_args_from_checkpoint(args, load_arg="pretrained_checkpoint")
        checkpointing.load_args_from_checkpoint(args)
    before_validation(args)
    with failure_in_words("check of the arguments"):
        arguments.validate_args(args, args_defaults)
    with failure_in_words("set-up of tokenizer and logging"):
        global_vars.set_global_variables(args)
    after_validation(args)
    return args


def argument_parser() -> ArgumentParser:
    """A parser with Megatron's own flags."""
    from megatron.training import arguments

    parser: ArgumentParser = arguments.add_megatron_arguments(ArgumentParser(allow_abbrev=False))
    return parser


def make_help_printable(parser: ArgumentParser) -> None:
    """Show help texts that argparse cannot format as they were written.

    Megatron 0.19.2 has one with a bare percent sign, on which `--help` ends in an error.
    """
    for action in parser._actions:
        try:
            _ = (action.help or "") % {**vars(action), "prog": parser.prog}
        except (KeyError, TypeError, ValueError):
            action.help = (action.help or "").replace("%", "%%")
