# SPDX-License-Identifier: Apache-2.0
"""What a sample is made of: positions, diffusion blocks, documents, views, active blocks. Pure.

Arrays: B = L/M blocks, V views, d documents.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megatron_csbp.transformer.geometry.scheme import CLEAN, length_error

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Sample:
    """The block table of one sample: block b of each view is positions [bM, (b+1)M), cut at its document's end.

    A document starts at a block boundary. What lies behind its end up to the next one is padding.

    Attributes:
        length: L, positions.
        block_size: M, positions in a block.
        num_views: V, corrupted copies of the one clean copy.
        documents: first position and first position behind each document, in order, int64 [d, 2].
        active: which blocks have corrupted rows, bool [V, B]; None for all.

    Raises:
        ValueError: a size is out of range, or documents overlap or do not start at a block.
    """

    length: int
    block_size: int
    num_views: int = 1
    documents: IntArray = None  # type: ignore[assignment]
    active: BoolArray | None = None

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(
                f"--diffusion-block-size {self.block_size} must be at least 1 token; 32 is a usual value."
            )
        if self.length < self.block_size or self.length % self.block_size:
            raise ValueError(length_error(self.length, self.block_size, 1))
        if self.num_views < 1:
            raise ValueError(f"{self.num_views} corrupted views: a sample has at least 1.")
        documents = [(0, self.length)] if self.documents is None else self.documents
        object.__setattr__(self, "documents", np.asarray(documents, dtype=np.int64).reshape(-1, 2))
        starts, stops = self.documents.T
        if (
            (starts % self.block_size).any()
            or (stops <= starts).any()
            or (starts[1:] < stops[:-1]).any()
            or (stops[-1:] > self.length).any()
            or not len(starts)
        ):
            raise ValueError(
                f"documents {self.documents.tolist()} must be in order, not empty, and start at multiples of "
                f"the block size {self.block_size} within {self.length} positions."
            )
        if self.active is not None:
            active = np.ascontiguousarray(self.active, dtype=np.bool_)
            if active.shape != (self.num_views, self.num_blocks):
                raise ValueError(f"active blocks have shape {active.shape}, not {(self.num_views, self.num_blocks)}.")
            object.__setattr__(self, "active", active & self._in_document)

    @property
    def num_blocks(self) -> int:
        """B = L/M, blocks of a view."""
        return self.length // self.block_size

    @property
    def is_static(self) -> bool:
        """Whether the sample is one document with every block active: the geometry of pretraining."""
        return self.active is None and self.documents.tolist() == [[0, self.length]]

    @property
    def views(self) -> range:
        """Numbers of the corrupted copies."""
        return range(self.num_views)

    @property
    def copies(self) -> tuple[int, ...]:
        """All copies in row order: the views, then the clean one."""
        return (*self.views, CLEAN)

    @cached_property
    def key(self) -> bytes:
        """Identity by content, for caches."""
        head = np.array([self.length, self.block_size, self.num_views, len(self.documents)], dtype=np.int64)
        active = b"" if self.active is None else np.packbits(self.active).tobytes()
        return head.tobytes() + self.documents.tobytes() + active

    @cached_property
    def _in_document(self) -> BoolArray:
        starts = np.arange(self.num_blocks) * self.block_size
        inside: BoolArray = starts < self.documents[np.maximum(self.document_of(starts), 0), 1]
        return inside & (self.document_of(starts) >= 0)

    @cached_property
    def active_blocks(self) -> BoolArray:
        """Which blocks have corrupted rows, bool [V, B]; none does that lies in padding."""
        if self.active is not None:
            return self.active
        return np.broadcast_to(self._in_document, (self.num_views, self.num_blocks))

    def document_of(self, positions: IntArray) -> IntArray:
        """Return the last document that starts at or before each position; -1 before the first."""
        return np.searchsorted(self.documents[:, 0], positions, side="right") - 1

    def documents_within(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return (document start, document stop, aligned stop) of the documents with blocks in [start, stop).

        The aligned stop is the end of the document's last block.
        """
        starts, documents = self._document_list
        first = bisect_right(starts, start) - 1
        return [
            document
            for document in documents[max(0, first) : bisect_left(starts, stop, lo=max(0, first))]
            if document[2] > start
        ]

    @cached_property
    def _document_list(self) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Starts of the documents, and the documents with their aligned stops."""
        block = self.block_size
        documents = [(start, stop, -(-stop // block) * block) for start, stop in self.documents.tolist()]
        return [start for start, _, _ in documents], documents


def packed_documents(lengths: Sequence[int], block_size: int) -> IntArray:
    """Return documents of these lengths, each at the first block boundary behind the one before, int64 [d, 2]."""
    documents, start = [], 0
    for length in lengths:
        documents.append((start, start + length))
        start += -(-length // block_size) * block_size
    return np.array(documents, dtype=np.int64).reshape(-1, 2)


def active_from_blocks(blocks: Iterable[Sequence[int]], num_blocks: int) -> BoolArray:
    """Return which blocks are active, bool [V, B], from the block numbers of each view."""
    rows = list(blocks)
    active = np.zeros((len(rows), num_blocks), dtype=np.bool_)
    for view, numbers in enumerate(rows):
        active[view, list(numbers)] = True
    return active
