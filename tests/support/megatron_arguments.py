# SPDX-License-Identifier: Apache-2.0
"""Command lines through Megatron's own parser, for tests of what follows it."""

import functools
from argparse import ArgumentParser, Namespace

from megatron.training.arguments import add_megatron_arguments

from megatron_csbp.arguments import add_arguments
from megatron_csbp.configuration.config_file import flags_given

VALID = (
    "--seq-length 64 --position-embedding-type rope --diffusion-block-size 8 --mask-token-id 190 --eval-interval 10"
)
"""A block-diffusion run on one rank, as far as the rules see it."""


@functools.cache
def parser() -> ArgumentParser:
    """Return Megatron's parser with this package's flags."""
    megatron = ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(megatron)
    return add_arguments(megatron)


def parse(command_line: str) -> tuple[Namespace, frozenset[str]]:
    """Return the parsed arguments and the flags that were given; the last of repeated flags counts.

    The job has as many ranks as the flags need.
    """
    words = command_line.split()
    args = parser().parse_args(words)
    group_size = max(args.context_parallel_size, args.block_parallel_size)
    args.world_size = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * max(group_size, 1)
    return args, frozenset(flags_given(words))
