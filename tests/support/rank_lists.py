# SPDX-License-Identifier: Apache-2.0
"""Which ranks form which parallel group. Pure: no torch, no Megatron.

All ranks lie on one integer grid, reshaped to the sizes of the parallel axes, and every group is a slice of it.
Megatron keeps two grids over the same ranks: the dense one (tp, cp, dp, pp) and the expert one (tp, ep, dp, pp), in
which tp and dp may have other sizes. The block-parallel axis lies over the context axis of the dense grid: it names
the same ranks and adds none, so DP4/CP2/BP2 is 8 ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

DEFAULT_RANK_ORDER = "tp-cp-ep-dp-pp"
PIPELINE_BEFORE_DATA_RANK_ORDER = "tp-cp-ep-pp-dp"
"""Megatron's order under --use-tp-pp-dp-mapping."""

_AXES = frozenset(DEFAULT_RANK_ORDER.split("-"))


@dataclass(frozen=True, kw_only=True)
class RankTopology:
    """The sizes of the parallel axes and the order in which ranks run through them.

    Attributes:
        world_size: Number of ranks.
        tensor_parallel_size: Ranks that share a layer.
        context_parallel_size: Size P of the context group: what Megatron is given as its context-parallel size, under
            context parallelism, pure block parallelism and CSBP alike.
        pipeline_parallel_size: Number of pipeline ranks.
        expert_parallel_size: Ranks that share the experts of a layer.
        expert_tensor_parallel_size: Ranks that share one expert; None for tensor_parallel_size.
        order: The axes, fastest-varying first, as in Megatron. Any permutation of tp, cp, ep, dp and pp.
    """

    world_size: int
    tensor_parallel_size: int = 1
    context_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    expert_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    order: str = DEFAULT_RANK_ORDER

    def __post_init__(self) -> None:
        """Check that the axes fill the world in both grids.

        Raises:
            ValueError: If a size is not positive, the order is not a permutation of the axes, the sizes do not divide
                the world, or the dense and the expert grid disagree about the pipeline groups.
        """
        if sorted(self.order.split("-")) != sorted(_AXES):
            raise ValueError(
                f"rank order {self.order!r}: must name each of tp, cp, ep, dp and pp once; Megatron uses "
                f"{DEFAULT_RANK_ORDER!r}, or {PIPELINE_BEFORE_DATA_RANK_ORDER!r} with --use-tp-pp-dp-mapping"
            )
        dense = {
            "--tensor-model-parallel-size": self.tensor_parallel_size,
            "--context-parallel-size": self.context_parallel_size,
            "--pipeline-model-parallel-size": self.pipeline_parallel_size,
        }
        expert = {
            "--expert-tensor-parallel-size": self._expert_tensor_size,
            "--expert-model-parallel-size": self.expert_parallel_size,
            "--pipeline-model-parallel-size": self.pipeline_parallel_size,
        }
        _check_divides(self.world_size, dense)
        _check_divides(self.world_size, expert)
        if self.groups("pp") != self.expert_groups("pp"):
            raise ValueError(
                f"rank order {self.order!r}: the dense and the expert layers must agree about the pipeline groups; "
                "give --expert-tensor-parallel-size x --expert-model-parallel-size the value "
                f"{self.tensor_parallel_size * self.context_parallel_size} (--tensor-model-parallel-size x the "
                f"context group), or use the order {DEFAULT_RANK_ORDER!r}"
            )

    @property
    def data_parallel_size(self) -> int:
        """Number of replicas of the dense parameters, the context group not counted."""
        return self.world_size // (
            self.tensor_parallel_size * self.context_parallel_size * self.pipeline_parallel_size
        )

    @property
    def expert_data_parallel_size(self) -> int:
        """Number of replicas of the expert parameters; this spans the context group."""
        return self.world_size // (self._expert_tensor_size * self.expert_parallel_size * self.pipeline_parallel_size)

    @property
    def _expert_tensor_size(self) -> int:
        if self.expert_tensor_parallel_size is None:
            return self.tensor_parallel_size
        return self.expert_tensor_parallel_size

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the groups of ranks that differ only in these axes of the dense grid.

        Args:
            axes: Names of axes: tp, cp, dp, pp.

        Returns:
            Every group once, in Megatron's order of groups and of ranks within a group.
        """
        sizes = {
            "tp": self.tensor_parallel_size,
            "cp": self.context_parallel_size,
            "ep": 1,
            "dp": self.data_parallel_size,
            "pp": self.pipeline_parallel_size,
        }
        return _groups(sizes, self.order, axes)

    def expert_groups(self, *axes: str) -> list[list[int]]:
        """Return the groups of ranks that differ only in these axes of the expert grid.

        Args:
            axes: Names of axes: tp (one expert's ranks), ep, dp (an expert's replicas), pp.

        Returns:
            Every group once, in Megatron's order of groups and of ranks within a group.
        """
        sizes = {
            "tp": self._expert_tensor_size,
            "cp": 1,
            "ep": self.expert_parallel_size,
            "dp": self.expert_data_parallel_size,
            "pp": self.pipeline_parallel_size,
        }
        return _groups(sizes, self.order, axes)


def check_block_parallel_size(block_parallel_size: int, context_parallel_size: int) -> None:
    """Check the rule between the block-parallel size and the size of the context group.

    Args:
        block_parallel_size: Ranks over which the corrupted blocks are divided.
        context_parallel_size: Size P of the context group.

    Raises:
        ValueError: If block_parallel_size is neither 1 nor the size of the context group.
    """
    if block_parallel_size not in (1, context_parallel_size):
        works = "1" if context_parallel_size == 1 else f"1 or {context_parallel_size}"
        raise ValueError(
            f"--bp-size {block_parallel_size}: block parallelism lies over the same ranks as context parallelism, so "
            f"its size is 1 or that of the context group, here {context_parallel_size}; use --bp-size {works}"
        )


def block_parallel_rank_lists(topology: RankTopology, block_parallel_size: int) -> list[list[int]]:
    """Return the global ranks of every block-parallel group.

    Args:
        topology: The grid of ranks. Its context_parallel_size is the size P of the context group.
        block_parallel_size: P for CSBP and for pure block parallelism; 1 for the context-parallel baseline and for
            one rank, which leave every rank in a group of its own.

    Returns:
        The groups; each rank of the world is in exactly one of them, and a group's ranks are in the order in which
        they own the blocks.

    Raises:
        ValueError: If block_parallel_size is neither 1 nor P.
    """
    check_block_parallel_size(block_parallel_size, topology.context_parallel_size)
    if block_parallel_size == 1:
        return [[rank] for rank in range(topology.world_size)]
    return topology.groups("cp")


def _check_divides(world_size: int, sizes: Mapping[str, int]) -> None:
    product = 1
    for flag, size in sizes.items():
        if size < 1:
            raise ValueError(f"{flag} {size}: must be at least 1; use {flag} 1")
        product *= size
    if world_size < 1 or world_size % product:
        smaller = world_size // product * product
        works = f"{smaller} or {smaller + product}" if smaller else f"{product}"
        given = " x ".join(f"{flag} {size}" for flag, size in sizes.items())
        raise ValueError(f"world size {world_size}: must be a multiple of {given} = {product}; start {works} ranks")


def _groups(sizes: Mapping[str, int], order: str, axes: tuple[str, ...]) -> list[list[int]]:
    assert set(axes) <= _AXES, f"unknown axis among {axes}"
    # NumPy's last dimension varies fastest, Megatron's first axis does.
    slow_to_fast = order.split("-")[::-1]
    shape = [sizes[axis] for axis in slow_to_fast]
    grid = np.arange(np.prod(shape)).reshape(shape)
    kept = [dim for dim, axis in enumerate(slow_to_fast) if axis not in axes]
    inside = [dim for dim, axis in enumerate(slow_to_fast) if axis in axes]
    group_size = int(np.prod([shape[dim] for dim in inside]))
    groups: list[list[int]] = grid.transpose(kept + inside).reshape(-1, group_size).tolist()
    return groups
