# SPDX-License-Identifier: Apache-2.0
"""The rows of every rank under every scheme, and the data under them, for tests of objectives and data."""

import numpy as np

from megatron_csbp.objectives import CleanRows
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import BlockAssignment, Scheme, Sharding

SPREAD_SCHEMES = [Scheme.CONTEXT_PARALLEL, Scheme.BLOCK_PARALLEL, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL]
TOPOLOGIES = [(Scheme.SINGLE, 1, BlockAssignment.DUAL_END)] + [
    (scheme, size, assignment)
    for scheme in SPREAD_SCHEMES
    for size in (2, 4)
    for assignment in (BlockAssignment.DUAL_END, BlockAssignment.CONTIGUOUS)
]


def layouts_of(
    length: int,
    block: int,
    scheme: Scheme = Scheme.SINGLE,
    size: int = 1,
    assignment: BlockAssignment = BlockAssignment.DUAL_END,
    views: int = 1,
) -> list[RankRows]:
    """The rows of each rank of a context group."""
    sample, sharding = Sample(length, block, views), Sharding(size, scheme, assignment)
    return [RankRows(sample, sharding, rank) for rank in range(size)]


def single(length: int, block: int, views: int = 1) -> RankRows:
    return layouts_of(length, block, views=views)[0]


def rows_under(
    layout: RankRows,
    text: np.ndarray,
    supervised: np.ndarray | None = None,
    next_supervised: np.ndarray | None = None,
) -> CleanRows:
    """The rows of a sample of L + 1 tokens, cut by positions."""
    everything = np.ones(len(text) - 1, dtype=bool)
    supervised = everything if supervised is None else supervised
    next_supervised = everything if next_supervised is None else next_supervised
    positions = layout.positions
    return CleanRows(
        tokens=text[positions],
        next_tokens=text[positions + 1],
        supervised=supervised[positions],
        next_supervised=next_supervised[positions],
        next_token_supervised=np.append(supervised, False)[positions + 1],
    )


def reassembled(layouts: list[RankRows], per_rank: list[np.ndarray], copy: int) -> np.ndarray:
    """One copy in position order, from the rank on which each of its rows counts; asserts that there is one."""
    whole = np.zeros(layouts[0].sample.length, dtype=per_rank[0].dtype)
    times = np.zeros(layouts[0].sample.length, dtype=int)
    for layout, values in zip(layouts, per_rank, strict=True):
        here = layout.is_counted & (layout.copies == copy)
        whole[layout.positions[here]] = values[here]
        times[layout.positions[here]] += 1
    assert (times == 1).all()
    return whole
