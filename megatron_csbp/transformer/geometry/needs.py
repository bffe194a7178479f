# SPDX-License-Identifier: Apache-2.0
"""Which clean positions every rank needs from others, and the collective that brings them cheapest. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np

from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.sample import IntArray
from megatron_csbp.transformer.geometry.visibility import Mask, raw_lower

Interval = tuple[int, int]


class Lowering(StrEnum):
    """The collective that a transfer becomes."""

    NOTHING = "nothing"
    ALL_GATHER = "all-gather"
    NEIGHBOUR = "neighbour"
    RANGES = "ranges"


@dataclass(frozen=True, eq=False)
class Needs:
    """Which clean positions every rank of the group needs from others, for one mask.

    Attributes:
        rows: this rank's rows.
        mask: of the layer.
        clean_queries: whether clean rows attend.
    """

    rows: RankRows
    mask: Mask
    clean_queries: bool = True

    @cached_property
    def by_rank(self) -> list[list[Interval]]:
        """Positions that each rank needs and does not hold, as intervals in order."""
        sharding = self.rows.sharding
        if not sharding.shares_clean_keys:
            return [[] for _ in range(sharding.group_size)]
        return [self._of_rank(rank) for rank in range(sharding.group_size)]

    @cached_property
    def lowering(self) -> Lowering:
        """The collective that brings the busiest rank fewest rows."""
        sharding, sample = self.rows.sharding, self.rows.sample
        if not sharding.shares_clean_keys:
            return Lowering.NOTHING
        if self.mask.window is None and sample.is_static:
            return Lowering.ALL_GATHER
        counts = self._counts
        busiest = int(max(counts.sum(axis=0).max(), counts.sum(axis=1).max()))
        if not busiest:
            return Lowering.NOTHING
        if busiest >= 2 * (sharding.group_size - 1) * self.rows.chunk_length:
            return Lowering.ALL_GATHER
        partners = int((counts > 0).sum(axis=1).max())
        return Lowering.NEIGHBOUR if partners <= 2 else Lowering.RANGES

    @cached_property
    def _counts(self) -> IntArray:
        """Rows that rank i needs from rank j, int64 [P, P]."""
        size, length = self.rows.sharding.group_size, self.rows.chunk_length
        counts = np.zeros((size, size), dtype=np.int64)
        for rank, intervals in enumerate(self.by_rank):
            for start, stop in intervals:
                for chunk in range(start // length, -(-stop // length)):
                    owner = self.rows.sharding.owner_of(chunk)
                    counts[rank, owner] += min(stop, (chunk + 1) * length) - max(start, chunk * length)
        return counts

    def _of_rank(self, rank: int) -> list[Interval]:
        rows, length = self.rows, self.rows.chunk_length
        sample, chunks = rows.sample, rows.sharding.chunks_of(rank)
        found: list[Interval] = []
        for chunk in chunks:
            first = chunk * length if self.clean_queries else self._first_block(rank, chunk)
            if first is not None:
                lower = int(self._lower(np.array([first]))[0])
                if lower < chunk * length:
                    found.append((lower, chunk * length))
        if rows.block_owners is not None:
            blocks = np.flatnonzero((rows.block_owners == rank).any(axis=0))
            starts = blocks * sample.block_size
            starts = starts[~np.isin(starts // length, chunks)]
            # The foreign block's own chunk is not here either: it needs all from its lower bound to its start.
            found.extend(zip(self._lower(starts).tolist(), starts.tolist(), strict=True))
        return subtract(merge(found), [(chunk * length, (chunk + 1) * length) for chunk in chunks])

    def _first_block(self, rank: int, chunk: int) -> int | None:
        """Return the position of the first active block that a rank holds in a chunk of its own."""
        rows, block = self.rows, self.rows.sample.block_size
        part = slice(chunk * rows.chunk_length // block, (chunk + 1) * rows.chunk_length // block)
        owners, active = rows.block_owners, rows.sample.active_blocks
        held = active[:, part] if owners is None else owners[:, part] == rank
        found = np.flatnonzero(held.any(axis=0))
        return None if not len(found) else chunk * rows.chunk_length + int(found[0]) * block

    def _lower(self, starts: IntArray) -> IntArray:
        """Return the first clean position that rows at these block starts see; the start itself in padding."""
        documents = self.rows.sample.documents[np.maximum(self.rows.sample.document_of(starts), 0)]
        lower = np.where((starts >= documents[:, 1]) | (starts < documents[:, 0]), starts, documents[:, 0])
        if self.mask.window is None:
            return lower
        return np.maximum(lower, np.minimum(raw_lower(starts, starts, self.mask, True), starts))


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals, in order and disjoint."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if start >= stop:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def subtract(intervals: Sequence[Interval], holes: Sequence[Interval]) -> list[Interval]:
    """Return what of the intervals is in no hole."""
    left = list(intervals)
    for hole_start, hole_stop in holes:
        cut = [
            piece for start, stop in left for piece in ((start, min(stop, hole_start)), (max(start, hole_stop), stop))
        ]
        left = [(start, stop) for start, stop in cut if start < stop]
    return left
