# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of an attention plan: query rows, key source, key rows, mask kind. Pure."""

from dataclasses import dataclass
from enum import StrEnum
from math import prod

import numpy as np
import numpy.typing as npt

type Repeats = tuple[tuple[int, int], ...]


class TileKind(StrEnum):
    """What part of the mask a tile covers."""

    PREFIX = "prefix"
    CLEAN_DIAGONAL = "clean diagonal"
    CORRUPTED_DIAGONAL = "corrupted diagonal"
    STAIRCASE = "staircase"


class KeySource(StrEnum):
    """Where a tile's keys lie: in this rank's rows, or in the buffer of gathered clean chunks."""

    LOCAL = "local"
    GATHERED = "gathered"


class MaskKind(StrEnum):
    """How a tile is masked: not at all, or causally (square tiles only)."""

    FULL = "full"
    CAUSAL = "causal"


@dataclass(frozen=True)
class RowPattern:
    """Runs of `length` consecutive rows, repeated at regular strides.

    Attributes:
        start: first row of the first run.
        length: T, rows of one run.
        repeats: (count, stride) pairs, outermost first; a run starts at `start` plus one multiple of each stride.
    """

    start: int
    length: int
    repeats: Repeats = ()

    @property
    def num_runs(self) -> int:
        """Number of runs in the pattern."""
        return prod(count for count, _ in self.repeats)

    def rows(self) -> npt.NDArray[np.int64]:
        """Return the row numbers, int64 [num_runs, T]."""
        starts = np.array([self.start])
        for count, stride in self.repeats:
            starts = (starts[:, None] + stride * np.arange(count)).reshape(-1)
        return starts[:, None] + np.arange(self.length)


@dataclass(frozen=True)
class Tile:
    """One batch of equal attention problems: run i of `query` meets run i of `key`."""

    kind: TileKind
    query: RowPattern
    key: RowPattern
    key_source: KeySource = KeySource.LOCAL
    mask: MaskKind = MaskKind.FULL

    @property
    def writes_first(self) -> bool:
        """Whether this is the first tile of its query rows (the diagonals cover every row exactly once)."""
        return self.kind in (TileKind.CLEAN_DIAGONAL, TileKind.CORRUPTED_DIAGONAL)

    @property
    def num_pairs(self) -> int:
        """Query-key pairs that the mask allows in this tile (for one head of one sequence)."""
        rows, keys = self.query.length, self.key.length
        return self.query.num_runs * (rows * (rows + 1) // 2 if self.mask is MaskKind.CAUSAL else rows * keys)
