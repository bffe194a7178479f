# SPDX-License-Identifier: Apache-2.0
"""Plans of delta-net layers: what a rank holds, in which order, and what is refused."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_csbp.transformer.delta_net.from_layout import plan_from_layout, whole_sequence
from megatron_csbp.transformer.delta_net.pieces import Pieces
from megatron_csbp.transformer.delta_net.plan import CleanChunk, CorruptedBlock, DeltaNetPlan
from megatron_csbp.transformer.layout import BlockAssignment, Scheme, SequenceLayout
from tests.support.delta_oracle import DeltaCase

CSBP, BP, CP = Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL, Scheme.BLOCK_PARALLEL, Scheme.CONTEXT_PARALLEL


def layout_of(scheme: Scheme, size: int, rank: int, assignment: BlockAssignment, blocks: int) -> SequenceLayout:
    return SequenceLayout(
        sequence_length=2 * size * 4 * blocks,
        block_size=4,
        group_size=size,
        rank=rank,
        scheme=scheme,
        assignment=assignment,
    )


@given(
    scheme=st.sampled_from([CSBP, BP]),
    size=st.integers(2, 6),
    blocks=st.integers(1, 4),
    assignment=st.sampled_from(BlockAssignment),
)
def test_the_plans_of_a_group_hold_what_its_layouts_hold(
    scheme: Scheme, size: int, blocks: int, assignment: BlockAssignment
) -> None:
    starts: Counter[int] = Counter()
    for rank in range(size):
        layout = layout_of(scheme, size, rank, assignment, blocks)
        plan = plan_from_layout(layout)
        for span in (*plan.chunks, *plan.blocks):
            rows = slice(span.first_row, span.first_row + span.length)
            assert layout.positions[rows].tolist() == list(range(span.start, span.start + span.length))
            assert layout.is_corrupted[rows].all() == isinstance(span, CorruptedBlock)
        assert plan.exchanges == (scheme is CSBP)
        assert [chunk.start // layout.chunk_length for chunk in plan.chunks] == (
            sorted(layout.chunks) if scheme is CSBP else [0]
        )
        starts.update(block.start for block in plan.blocks)
        if scheme is CSBP:
            gathered = [chunk for other in range(size) for chunk in sorted(layout.chunks_of(other))]
            assert [gathered[place] for place in plan.gather_order] == list(range(2 * size))
    assert starts == Counter(range(0, layout.sequence_length, 4))


@given(size=st.integers(2, 5), blocks=st.integers(1, 3), assignment=st.sampled_from(BlockAssignment))
def test_the_cp_baseline_sees_corrupted_and_then_clean_rows_in_order(
    size: int, blocks: int, assignment: BlockAssignment
) -> None:
    layouts = [layout_of(CP, size, rank, assignment, blocks) for rank in range(size)]
    plan, order = whole_sequence(layouts[1])
    positions = np.concatenate([layout.positions for layout in layouts])[list(order)]
    is_corrupted = np.concatenate([layout.is_corrupted for layout in layouts])[list(order)]
    length = layouts[0].sequence_length
    assert positions.tolist() == [*range(length), *range(length)]
    assert is_corrupted.tolist() == [True] * length + [False] * length
    assert (plan.num_rows, plan.exchanges, len(plan.blocks)) == (2 * length, False, length // 4)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_every_row_is_in_one_piece_and_every_block_in_the_segment_that_it_starts_in(steps: int) -> None:
    case = DeltaCase(group_size=4, blocks_per_chunk=5, views=2, document_blocks=(0, 3, 8))
    plan, _ = case.plan(1)
    pieces = Pieces(plan, steps)
    rows = [row for p in pieces.in_row_order for row in range(p.first_row, p.first_row + p.length)]
    assert rows == list(range(plan.num_rows))
    for piece in pieces.in_row_order:
        assert all(plan.step_of(block) in pieces.steps_of(piece.segment) for block in piece.blocks)
    (batch,) = pieces.batches
    assert sorted(batch.blocks, key=lambda block: block.first_row) == list(plan.blocks)
    assert sum(batch.counts) == len(plan.blocks)


def test_a_block_off_the_rank_of_its_chunk_is_refused() -> None:
    chunks = (CleanChunk(0, 8, 0),)
    with pytest.raises(ValueError, match="block at position 8 is not on the rank of its clean chunk"):
        DeltaNetPlan(12, chunks, (CorruptedBlock(8, 4, 8),), owners=(0, 1))


def test_chunks_of_a_rank_are_of_one_length() -> None:
    with pytest.raises(ValueError, match="must be of one length"):
        DeltaNetPlan(12, (CleanChunk(0, 8, 0), CleanChunk(8, 12, 8)), ())


def test_blocks_of_two_lengths_and_documents_set_the_step() -> None:
    chunk = CleanChunk(16, 32, 0, document_starts=(8, 28))
    plan = DeltaNetPlan(16 + 8 + 4, (chunk,), (CorruptedBlock(16, 8, 16), CorruptedBlock(28, 4, 24)))
    assert (plan.step, plan.steps) == (4, 4)
    assert plan.keeps == ((True, True, True, False),)
    assert [plan.rows_before(chunk, position, 3) for position in (16, 28, 30)] == [3, 0, 2]
    assert list(plan.pieces(chunk)) == [(16, 12), (28, 4)]
    assert [batch.length for batch in Pieces(plan, 4).batches] == [4, 8]
