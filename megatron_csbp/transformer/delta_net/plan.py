# SPDX-License-Identifier: Apache-2.0
"""What one rank computes in a gated delta net layer, and what it exchanges. Pure: no torch, no Megatron.

The clean copy is cut into chunks, each on one rank. A corrupted block starts from the clean state, and from the last
clean rows of the short convolution, at its first position, so it lives where the clean chunk around that position is.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise


@dataclass(frozen=True)
class CleanChunk:
    """Consecutive clean positions in consecutive local rows.

    Attributes:
        start: first position.
        stop: position behind the last.
        first_row: local row of `start`.
        document_starts: first positions, ascending, of the documents that the chunk has rows of; the first may lie
            before `start`.
    """

    start: int
    stop: int
    first_row: int
    document_starts: tuple[int, ...] = (0,)

    @property
    def length(self) -> int:
        """Positions in the chunk."""
        return self.stop - self.start


@dataclass(frozen=True)
class CorruptedBlock:
    """A corrupted block in consecutive local rows.

    Attributes:
        start: first position.
        length: positions in the block.
        first_row: local row of `start`.
        view: which corrupted copy it is of.
    """

    start: int
    length: int
    first_row: int
    view: int = 0


@dataclass(frozen=True, eq=False)
class DeltaNetPlan:
    """What one rank of a context group holds. Plans are equal if they are the same object, so hashing one is cheap.

    Attributes:
        num_rows: S, local rows.
        chunks: clean chunks of this rank, in position order, of equal length.
        blocks: corrupted blocks of this rank.
        owners: the rank of every clean chunk of the sequence, in position order; empty if each rank holds the whole
            clean copy, so that nothing is exchanged.
        rank: this rank.
    """

    num_rows: int
    chunks: tuple[CleanChunk, ...]
    blocks: tuple[CorruptedBlock, ...]
    owners: tuple[int, ...] = ()
    rank: int = 0

    def __post_init__(self) -> None:
        if len({chunk.length for chunk in self.chunks}) != 1:
            raise ValueError(f"clean chunks of one rank must be of one length, not {self.chunks}.")
        if self.owners and self.owners.count(self.rank) != len(self.chunks):
            raise ValueError(f"rank {self.rank} owns {self.owners.count(self.rank)} chunks and holds {self.chunks}.")
        for block in self.blocks:
            chunk = self.chunks[self.chunk_of(block)]
            if not chunk.start <= block.start < chunk.stop:
                raise ValueError(
                    f"the corrupted block at position {block.start} is not on the rank of its clean chunk: with "
                    "gated delta net layers a block must be, since it starts from that chunk's state."
                )
        rows = sorted([(c.first_row, c.length) for c in self.chunks] + [(b.first_row, b.length) for b in self.blocks])
        ends = [first + length for first, length in rows]
        assert [first for first, _ in rows] == [0, *ends[:-1]], "every local row is in one chunk or block"
        assert ends[-1] == self.num_rows

    @property
    def group_size(self) -> int:
        """P, ranks that exchange states."""
        return max(self.owners) + 1 if self.owners else 1

    @property
    def exchanges(self) -> bool:
        """Whether states and rows cross links."""
        return self.group_size > 1

    @cached_property
    def own_chunks(self) -> tuple[int, ...]:
        """Indices of this rank's chunks among those of the sequence, in position order."""
        return tuple(chunk for chunk, owner in enumerate(self.owners) if owner == self.rank)

    @cached_property
    def gather_order(self) -> tuple[int, ...]:
        """For every chunk of the sequence, where it lies in what is gathered rank by rank."""
        per_rank = len(self.owners) // self.group_size
        seen = [0] * self.group_size
        order = []
        for owner in self.owners:
            order.append(owner * per_rank + seen[owner])
            seen[owner] += 1
        assert all(count == per_rank for count in seen), "every rank owns equally many chunks"
        return tuple(order)

    def chunk_of(self, block: CorruptedBlock) -> int:
        """Return the index in `chunks` of the chunk that a block starts in."""
        return max(0, bisect_right(self.chunks, block.start, key=lambda chunk: chunk.start) - 1)

    @cached_property
    def step(self) -> int:
        """Distance of the positions of a chunk at which a block or document may start; it divides the chunk."""
        step = self.chunks[0].length
        for block in self.blocks:
            step = math.gcd(step, block.start - self.chunks[self.chunk_of(block)].start)
        for chunk in self.chunks:
            for start in chunk.document_starts:
                step = math.gcd(step, max(0, start - chunk.start))
        return step

    @property
    def steps(self) -> int:
        """Steps of a chunk."""
        return self.chunks[0].length // self.step

    def step_of(self, block: CorruptedBlock) -> int:
        """Return the step of its chunk at which a block starts."""
        return (block.start - self.chunks[self.chunk_of(block)].start) // self.step

    @cached_property
    def keeps(self) -> tuple[tuple[bool, ...], ...]:
        """For every chunk and step, whether the state before it is kept; it is not where a document starts."""
        return tuple(
            tuple(chunk.start + step * self.step not in chunk.document_starts for step in range(self.steps))
            for chunk in self.chunks
        )

    @property
    def is_one_document(self) -> bool:
        """Whether the whole sequence is one document."""
        return all(chunk.document_starts == (0,) for chunk in self.chunks)

    def rows_before(self, chunk: CleanChunk, position: int, wanted: int) -> int:
        """Return how many of the `wanted` clean rows before a position are of its own document."""
        document = chunk.document_starts[bisect_right(chunk.document_starts, position) - 1]
        return min(wanted, position - document)

    def pieces(self, chunk: CleanChunk) -> Iterator[tuple[int, int]]:
        """Yield (first position, length) of the documents' parts of a chunk."""
        cuts = [chunk.start, *(start for start in chunk.document_starts if start > chunk.start), chunk.stop]
        for start, stop in pairwise(cuts):
            yield start, stop - start
