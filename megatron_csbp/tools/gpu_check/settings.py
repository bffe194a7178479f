# SPDX-License-Identifier: Apache-2.0
"""The sizes that the check runs at: the full form for a GPU, a reduced one for a CPU."""

from dataclasses import dataclass

import torch

from megatron_csbp.transformer.kernels import HeadShape


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes of one run of the check.

    Attributes:
        device: where to run.
        backends: values of `--csbp-attention-backend` to check.
        block_size: M, tokens in a diffusion block.
        accuracy_length: L of the comparisons with fp64.
        accuracy_heads: heads of the comparisons.
        num_head_groups: groups of heads in the comparisons that exchange them in turn.
        group_sizes: sizes P of the context groups that are simulated.
        timing_lengths: L of the timings.
        timing_heads: heads of the timings.
        timing_group_size: P of the timed rank.
        repeats: timed calls, after one call to warm up.
    """

    device: torch.device
    backends: tuple[str, ...]
    block_size: int
    accuracy_length: int
    accuracy_heads: HeadShape
    num_head_groups: int
    group_sizes: tuple[int, ...]
    timing_lengths: tuple[int, ...]
    timing_heads: HeadShape
    timing_group_size: int
    repeats: int


def full_form(device: torch.device, lengths: tuple[int, ...] | None) -> Settings:
    """Return the sizes for a GPU: head dim 128, 32 query and 8 key/value heads, up to 131,072 tokens.

    Args:
        device: the GPU.
        lengths: L of the timings; 16K to 128K by default.
    """
    return Settings(
        device=device,
        backends=("transformer_engine", "torch", "flex", "hybrid"),
        block_size=32,
        accuracy_length=2048,
        accuracy_heads=HeadShape(8, 2, 128),
        num_head_groups=2,
        group_sizes=(2, 4, 8),
        timing_lengths=lengths or (16384, 32768, 65536, 131072),
        timing_heads=HeadShape(32, 8, 128),
        timing_group_size=8,
        repeats=3,
    )


def reduced_form(lengths: tuple[int, ...] | None) -> Settings:
    """Return the sizes for a CPU, which checks the script and no GPU kernel.

    Args:
        lengths: L of the timings.
    """
    return Settings(
        device=torch.device("cpu"),
        backends=("torch",),
        block_size=8,
        accuracy_length=128,
        accuracy_heads=HeadShape(4, 2, 32),
        num_head_groups=2,
        group_sizes=(2, 4),
        timing_lengths=lengths or (256,),
        timing_heads=HeadShape(4, 2, 32),
        timing_group_size=2,
        repeats=1,
    )
