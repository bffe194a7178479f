# SPDX-License-Identifier: Apache-2.0
"""Local rows cut into what is computed together, and back. Pure planning, and two functions on tensors.

Shapes: S local rows, c clean chunks of C rows, n corrupted blocks of M rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby

import torch
from torch import Tensor

from megatron_csbp.transformer.delta_net.plan import CleanChunk, CorruptedBlock, DeltaNetPlan


@dataclass(frozen=True)
class Piece:
    """Consecutive local rows: a clean chunk, or corrupted blocks of one length that start in one segment.

    Attributes:
        first_row: local row of the first.
        length: rows.
        chunk: index of the chunk, or None for blocks.
        blocks: the blocks, in row order.
        segment: index of the segment that the blocks start in.
    """

    first_row: int
    length: int
    chunk: int | None
    blocks: tuple[CorruptedBlock, ...]
    segment: int


@dataclass(frozen=True)
class BlockBatch:
    """All corrupted blocks of one length, those that start in the first segment first.

    Attributes:
        length: M.
        blocks: the blocks.
        counts: how many start in each segment.
        pieces: indices of the pieces that hold them, in order.
    """

    length: int
    blocks: tuple[CorruptedBlock, ...]
    counts: tuple[int, ...]
    pieces: tuple[int, ...]


@dataclass(frozen=True)
class Pieces:
    """How a plan's rows are cut.

    Attributes:
        plan: the rank's plan.
        segment_steps: steps of a chunk that are computed together, the last segment may have fewer.
    """

    plan: DeltaNetPlan
    segment_steps: int

    @property
    def num_segments(self) -> int:
        """Segments of a chunk."""
        return -(-self.plan.steps // self.segment_steps)

    def steps_of(self, segment: int) -> range:
        """Return the steps of a segment."""
        first = segment * self.segment_steps
        return range(first, min(first + self.segment_steps, self.plan.steps))

    @cached_property
    def in_row_order(self) -> tuple[Piece, ...]:
        """All pieces, in row order; together they are all local rows."""
        spans: list[CleanChunk | CorruptedBlock] = sorted(
            [*self.plan.chunks, *self.plan.blocks], key=lambda span: span.first_row
        )
        pieces = []
        for (chunk, segment, _), run in groupby(spans, self._kind):
            of_piece = list(run)
            length = sum(span.length for span in of_piece)
            blocks = tuple(span for span in of_piece if isinstance(span, CorruptedBlock))
            pieces.append(Piece(of_piece[0].first_row, length, chunk, blocks, segment))
        return tuple(pieces)

    def _kind(self, span: CleanChunk | CorruptedBlock) -> tuple[int | None, int, int]:
        """Return what consecutive spans of one piece have in common: chunk, segment, length of a block."""
        if isinstance(span, CleanChunk):
            return self.plan.chunks.index(span), 0, 0
        return None, self.plan.step_of(span) // self.segment_steps, span.length

    @cached_property
    def chunk_pieces(self) -> tuple[int, ...]:
        """Indices of the pieces that are chunks, in the order of the plan's chunks."""
        of_chunk = {piece.chunk: index for index, piece in enumerate(self.in_row_order) if piece.chunk is not None}
        return tuple(of_chunk[chunk] for chunk in range(len(self.plan.chunks)))

    @cached_property
    def batches(self) -> tuple[BlockBatch, ...]:
        """The corrupted blocks, by length."""
        batches = []
        for length in sorted({block.length for block in self.plan.blocks}):
            indices = [i for i, p in enumerate(self.in_row_order) if p.blocks and p.blocks[0].length == length]
            indices.sort(key=lambda index: self.in_row_order[index].segment)
            pieces = [self.in_row_order[index] for index in indices]
            counts = [0] * self.num_segments
            for piece in pieces:
                counts[piece.segment] += len(piece.blocks)
            blocks = tuple(block for piece in pieces for block in piece.blocks)
            batches.append(BlockBatch(length, blocks, tuple(counts), tuple(indices)))
        return tuple(batches)

    def split(self, tensor_S: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the clean rows [c, C, ...] of local rows [S, ...], and those of each batch of blocks [n, M, ...]."""
        parts = torch.split(tensor_S, [piece.length for piece in self.in_row_order])
        clean_cC = torch.stack([parts[index] for index in self.chunk_pieces])
        blocks = [
            torch.cat([torch.unflatten(parts[index], 0, (-1, batch.length)) for index in batch.pieces])
            for batch in self.batches
        ]
        return clean_cC, blocks

    def join(self, clean_cC: Tensor, blocks_nM: Sequence[Tensor]) -> Tensor:
        """Put rows back in row order: the inverse of `split`."""
        parts: list[Tensor] = [clean_cC] * len(self.in_row_order)
        for index, rows_C in zip(self.chunk_pieces, clean_cC.unbind(), strict=True):
            parts[index] = rows_C
        for batch, rows_nM in zip(self.batches, blocks_nM, strict=True):
            counts = [len(self.in_row_order[index].blocks) for index in batch.pieces]
            for index, rows in zip(batch.pieces, torch.split(rows_nM, counts), strict=True):
                parts[index] = rows.flatten(0, 1)
        return torch.cat(parts)


@lru_cache(maxsize=256)
def pieces_of(plan: DeltaNetPlan, segment_steps: int) -> Pieces:
    """Return how a plan's rows are cut; each plan is cut once."""
    return Pieces(plan, segment_steps)
