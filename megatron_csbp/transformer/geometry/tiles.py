# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of an attention plan: query rows, key source, key rows, shape of the mask. Pure."""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import prod

import numpy as np

from megatron_csbp.transformer.geometry.sample import IntArray

MOST_FOLDED_ROWS = 128
"""Unmasked problems with no more rows than this have the query heads of one key head folded into rows: a kernel's
blocks of rows are this large, and would otherwise be mostly empty."""

type Repeats = tuple[tuple[int, int], ...]
"""(count, stride) pairs, outermost first."""


class KeySource(StrEnum):
    """Where a tile's keys lie: in this rank's rows, or in the buffer of gathered clean rows."""

    LOCAL = "local"
    GATHERED = "gathered"


class MaskKind(StrEnum):
    """Which pairs of a tile are allowed: all; keys up to the row's number; or from the row's number on.

    `CAUSAL` and `ANTICAUSAL` tiles are square. An anticausal one is causal on reversed rows and keys.
    """

    FULL = "full"
    CAUSAL = "causal"
    ANTICAUSAL = "anticausal"


@dataclass(frozen=True, eq=False)
class RowPattern:
    """The rows of G problems, T rows each: runs of consecutive rows at regular strides, or at listed starts.

    Attributes:
        length: rows of one run.
        start: first row of the first run.
        repeats: where the problems start, relative to `start`.
        segments: where the runs that make up one problem start, relative to its start; T is their rows together.
        starts: first row of each problem, int64 [G], in place of `start` and `repeats` where they are not regular.
    """

    length: int
    start: int = 0
    repeats: Repeats = ()
    segments: Repeats = ()
    starts: IntArray | None = None

    @property
    def num_problems(self) -> int:
        """G."""
        return len(self.starts) if self.starts is not None else prod(count for count, _ in self.repeats)

    @property
    def num_rows(self) -> int:
        """T, rows of one problem."""
        return self.length * prod(count for count, _ in self.segments)

    def problem_starts(self) -> IntArray:
        """Return the first row of each problem, int64 [G]."""
        if self.starts is not None:
            return self.starts
        return (self.start + _offsets(self.repeats)).reshape(-1)

    @cached_property
    def all_rows(self) -> IntArray:
        """The row numbers of all problems, one after the other, int64 [G T]."""
        return self.rows().reshape(-1)

    def rows(self) -> IntArray:
        """Return the row numbers, int64 [G, T]."""
        inside = (_offsets(self.segments)[:, None] + np.arange(self.length)).reshape(-1)
        return self.problem_starts()[:, None] + inside


def _offsets(repeats: Repeats) -> IntArray:
    """Return where the runs of a nest of strides start, int64 [runs]."""
    offsets = np.zeros(1, dtype=np.int64)
    for count, stride in repeats:
        offsets = (offsets[:, None] + stride * np.arange(count)).reshape(-1)
    return offsets


@dataclass(frozen=True, eq=False)
class Tile:
    """One batch of equal attention problems: problem i of `query` meets problem i of `key`.

    The problems of a batch share no query row and no key row, so that results and gradients can be added batch by
    batch.

    Attributes:
        query: query rows.
        key: key rows, in `key_source`.
        key_source: where the keys lie.
        mask: shape of the mask.
        writes_first: whether no earlier tile has results of these query rows.
        meets_corrupted_keys: whether keys of corrupted rows are among its keys.
        writes_last: whether no later tile has results of these query rows; known for tiles with gathered keys only.
    """

    query: RowPattern
    key: RowPattern
    key_source: KeySource = KeySource.LOCAL
    mask: MaskKind = MaskKind.FULL
    writes_first: bool = False
    meets_corrupted_keys: bool = False
    writes_last: bool = False

    @property
    def kind(self) -> str:
        """Name for profilers."""
        return f"{self.key_source} {self.mask}"

    @property
    def folds_heads(self) -> bool:
        """Whether kernels get the query heads of one key head as rows: exact, since every row meets every key."""
        return self.mask is MaskKind.FULL and self.query.num_rows <= MOST_FOLDED_ROWS

    @property
    def num_pairs(self) -> int:
        """Query-key pairs that the mask allows in this tile (for one head of one sequence)."""
        rows, keys = self.query.num_rows, self.key.num_rows
        return self.query.num_problems * (rows * keys if self.mask is MaskKind.FULL else rows * (rows + 1) // 2)
