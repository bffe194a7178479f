# SPDX-License-Identifier: Apache-2.0
"""The rows that one rank holds, in order. Pure.

Row order: for the early and then for the late chunk, view 0, view 1, ..., clean; then blocks of other chunks, view by
view. So the queries of a chunk are one slice, and so is each clean chunk that goes on the wire. Pure BP holds its
corrupted chunks first and then the whole clean copy.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_csbp.transformer.geometry.sample import BoolArray, IntArray, Sample
from megatron_csbp.transformer.geometry.scheme import CLEAN, Sharding, length_error, required_multiple


@dataclass(frozen=True)
class Span:
    """Consecutive positions of one copy in consecutive local rows.

    Attributes:
        copy: view, or CLEAN.
        start: first position.
        stop: first position behind it.
        first_row: local row of the first position.
        chunk: chunk that the positions lie in; 0 for a replicated clean copy.
    """

    copy: int
    start: int
    stop: int
    first_row: int
    chunk: int

    @property
    def length(self) -> int:
        """Rows."""
        return self.stop - self.start


@dataclass(frozen=True, eq=False)
class RankRows:
    """The rows of one rank of a context group.

    Attributes:
        sample: blocks, documents, views.
        sharding: who owns which chunk.
        rank: r, this rank in the context group.
        block_owners: rank of each active block, int64 [V, B], -1 where inactive; None: the owner of its chunk.

    Raises:
        ValueError: the length does not divide into whole blocks of chunks, or there is no such rank.
    """

    sample: Sample
    sharding: Sharding
    rank: int = 0
    block_owners: IntArray | None = None

    def __post_init__(self) -> None:
        size, block = self.sharding.group_size, self.sample.block_size
        if self.sample.length % required_multiple(block, size):
            raise ValueError(length_error(self.sample.length, block, size))
        if not 0 <= self.rank < size:
            raise ValueError(f"rank {self.rank} is not in a context group of {size} ranks.")

    @property
    def chunk_length(self) -> int:
        """C, positions in a chunk."""
        return self.sample.length // self.sharding.num_chunks

    @property
    def static_chunk_length(self) -> int | None:
        """C where the geometry is that of pretraining, the same for every sample; else None."""
        return self.chunk_length if self.sample.is_static and self.block_owners is None else None

    @property
    def chunks(self) -> tuple[int, ...]:
        """The chunks that this rank owns."""
        return self.sharding.chunks_of(self.rank)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The local rows as runs of consecutive positions, in row order."""
        spans: list[Span] = []
        row = 0
        for copy, start, stop, chunk in self._runs():
            spans.append(Span(copy, start, stop, row, chunk))
            row += stop - start
        return tuple(spans)

    def _runs(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield (copy, start, stop, chunk) in row order."""
        length, replicated = self.chunk_length, self.sharding.clean_is_replicated
        for chunk in self.chunks:
            for view in self.sample.views:
                yield from self._corrupted_runs(view, chunk)
            if not replicated:
                yield CLEAN, chunk * length, (chunk + 1) * length, chunk
        if replicated:
            yield CLEAN, 0, self.sample.length, 0
        if self.block_owners is not None:
            mine = (self.block_owners == self.rank).any(axis=0).reshape(self.sharding.num_chunks, -1).any(axis=1)
            foreign = [int(chunk) for chunk in np.flatnonzero(mine) if chunk not in self.chunks]
            for view in self.sample.views:
                for chunk in foreign:
                    yield from self._corrupted_runs(view, chunk)

    def _corrupted_runs(self, view: int, chunk: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the runs of one view's blocks in one chunk that this rank holds."""
        length, block = self.chunk_length, self.sample.block_size
        if self.sample.is_static and self.block_owners is None:
            yield view, chunk * length, (chunk + 1) * length, chunk
            return
        first, last = chunk * length // block, (chunk + 1) * length // block
        if self.block_owners is not None:
            held = self.block_owners[view, first:last] == self.rank
        else:
            held = self.sample.active_blocks[view, first:last]
        edges = np.flatnonzero(np.diff(np.concatenate([[False], held, [False]])))
        for begin, end in edges.reshape(-1, 2).tolist():
            yield view, (first + begin) * block, (first + end) * block, chunk

    @cached_property
    def num_rows(self) -> int:
        """S, local rows: (V+1) L/P for a static sample, or L + V L/P for pure BP."""
        return sum(span.length for span in self.spans)

    @cached_property
    def num_corrupted_rows(self) -> int:
        """Local rows of all views."""
        return sum(span.length for span in self.spans if span.copy != CLEAN)

    @cached_property
    def sample_positions(self) -> IntArray:
        """Position in the sample of every local row, int64 [S]."""
        return np.concatenate([np.arange(span.start, span.stop) for span in self.spans])

    @cached_property
    def positions(self) -> IntArray:
        """Position in its document of every local row, int64 [S]: all copies of a token have the same one."""
        if len(self.sample.documents) == 1 and self.sample.documents[0, 0] == 0:
            return self.sample_positions
        document = np.maximum(self.sample.document_of(self.sample_positions), 0)
        positions: IntArray = np.maximum(self.sample_positions - self.sample.documents[document, 0], 0)
        return positions

    @cached_property
    def document_stops(self) -> IntArray:
        """First position behind the document of every local row, int64 [S]; rows from there on are padding."""
        stops: IntArray = self.sample.documents[np.maximum(self.sample.document_of(self.sample_positions), 0), 1]
        return stops

    @cached_property
    def copies(self) -> IntArray:
        """View of every local row, or CLEAN, int64 [S]."""
        return np.concatenate([np.full(span.length, span.copy) for span in self.spans])

    @cached_property
    def is_corrupted(self) -> BoolArray:
        """Whether a local row belongs to a corrupted copy, bool [S]."""
        corrupted: BoolArray = self.copies != CLEAN
        return corrupted

    @cached_property
    def is_counted(self) -> BoolArray:
        """Whether a loss on a local row counts here, bool [S]: every row of a copy counts on exactly one rank."""
        counted: BoolArray = self.is_corrupted | np.isin(self.sample_positions // self.chunk_length, self.chunks)
        return counted

    def row_of(self, copy: int, position: int) -> int:
        """Return the local row of a position of a copy.

        Raises:
            KeyError: this rank does not hold it.
        """
        for span in self.spans:
            if span.copy == copy and span.start <= position < span.stop:
                return span.first_row + position - span.start
        raise KeyError(f"rank {self.rank} holds no row of copy {copy} at position {position}")

    def holds_clean(self, chunk: int) -> bool:
        """Return whether this rank holds a chunk's clean rows."""
        return self.sharding.clean_is_replicated or chunk in self.chunks
