# SPDX-License-Identifier: Apache-2.0
"""The plan of delta-net layers for a `SequenceLayout`. Pure: no torch, no Megatron."""

from megatron_csbp.transformer.delta_net.plan import CleanChunk, CorruptedBlock, DeltaNetPlan
from megatron_csbp.transformer.layout import Scheme, SequenceLayout, Stream


def plan_from_layout(layout: SequenceLayout) -> DeltaNetPlan:
    """Return what the rank of a layout computes; for a CP baseline, see `whole_sequence`."""
    chunks, blocks = [], []
    for segment in layout.segments:
        first, length = segment.first_position, segment.length
        if segment.stream is Stream.CLEAN:
            chunks.append(CleanChunk(first, first + length, segment.first_row))
        else:
            blocks += [
                CorruptedBlock(first + offset, layout.block_size, segment.first_row + offset)
                for offset in range(0, length, layout.block_size)
            ]
    owners = (
        tuple(layout.owner_of(chunk) for chunk in range(layout.num_chunks))
        if layout.scheme is Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL
        else ()
    )
    return DeltaNetPlan(layout.num_rows, tuple(chunks), tuple(blocks), owners, layout.rank)


def whole_sequence(layout: SequenceLayout) -> tuple[DeltaNetPlan, tuple[int, ...]]:
    """Return how the CP baseline sees the sequence, which gives every rank all rows of some of the heads.

    Returns:
        The plan of all rows, and for each of its rows the row among those gathered rank by rank.
    """
    group = [layout_of_rank(layout, rank) for rank in range(layout.group_size)]
    segments = sorted(
        (
            (segment.first_position, rank * layout.num_rows + segment.first_row, segment.length, segment.stream)
            for rank, of_rank in enumerate(group)
            for segment in of_rank.segments
        ),
        key=lambda segment: (segment[3] is Stream.CLEAN, segment[0]),
    )
    order = tuple(row + offset for _, row, length, _ in segments for offset in range(length))
    size = layout.block_size
    blocks = tuple(CorruptedBlock(start, size, start) for start in range(0, layout.sequence_length, size))
    chunk = CleanChunk(0, layout.sequence_length, layout.sequence_length)
    return DeltaNetPlan(2 * layout.sequence_length, (chunk,), blocks), order


def layout_of_rank(layout: SequenceLayout, rank: int) -> SequenceLayout:
    """Return the layout of another rank of the group."""
    return SequenceLayout(
        sequence_length=layout.sequence_length,
        block_size=layout.block_size,
        group_size=layout.group_size,
        rank=rank,
        scheme=layout.scheme,
        assignment=layout.assignment,
    )
