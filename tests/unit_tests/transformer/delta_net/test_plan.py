# SPDX-License-Identifier: Apache-2.0
"""Plans of delta-net layers: what a rank holds, in which order, and what is refused."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_csbp.transformer.delta_net.from_rows import plan_from_rows, whole_sequence
from megatron_csbp.transformer.delta_net.pieces import Pieces
from megatron_csbp.transformer.delta_net.plan import CleanChunk, CorruptedBlock, DeltaNetPlan
from megatron_csbp.transformer.geometry.layer_plans import rank_rows
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import CLEAN, BlockAssignment, Scheme, Sharding
from tests.support.delta_oracle import DeltaCase

CSBP, BP, CP = Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL, Scheme.BLOCK_PARALLEL, Scheme.CONTEXT_PARALLEL


def rows_of(scheme: Scheme, size: int, rank: int, assignment: BlockAssignment, blocks: int, views: int) -> RankRows:
    return RankRows(Sample(2 * size * 4 * blocks, 4, views), Sharding(size, scheme, assignment), rank)


@given(
    scheme=st.sampled_from([CSBP, BP]),
    size=st.integers(2, 6),
    blocks=st.integers(1, 4),
    assignment=st.sampled_from(BlockAssignment),
    views=st.integers(1, 2),
)
def test_the_plans_of_a_group_hold_what_its_ranks_hold(
    scheme: Scheme, size: int, blocks: int, assignment: BlockAssignment, views: int
) -> None:
    starts: Counter[tuple[int, int]] = Counter()
    for rank in range(size):
        held = rows_of(scheme, size, rank, assignment, blocks, views)
        plan = plan_from_rows(held)
        for span in (*plan.chunks, *plan.blocks):
            rows = slice(span.first_row, span.first_row + span.length)
            copy = span.view if isinstance(span, CorruptedBlock) else CLEAN
            assert held.sample_positions[rows].tolist() == list(range(span.start, span.start + span.length))
            assert (held.copies[rows] == copy).all()
        assert plan.exchanges == (scheme is CSBP)
        assert [chunk.start // held.chunk_length for chunk in plan.chunks] == (
            sorted(held.chunks) if scheme is CSBP else [0]
        )
        starts.update((block.view, block.start) for block in plan.blocks)
        if scheme is CSBP:
            gathered = [chunk for other in range(size) for chunk in sorted(held.sharding.chunks_of(other))]
            assert [gathered[place] for place in plan.gather_order] == list(range(2 * size))
    assert starts == Counter(product(range(views), range(0, held.sample.length, 4)))


@given(
    size=st.integers(2, 5),
    blocks=st.integers(1, 3),
    assignment=st.sampled_from(BlockAssignment),
    views=st.integers(1, 2),
)
def test_the_cp_baseline_sees_corrupted_and_then_clean_rows_in_order(
    size: int, blocks: int, assignment: BlockAssignment, views: int
) -> None:
    ranks = [rows_of(CP, size, rank, assignment, blocks, views) for rank in range(size)]
    plan, order = whole_sequence(ranks[1])
    positions = np.concatenate([rows.sample_positions for rows in ranks])[list(order)]
    copies = np.concatenate([rows.copies for rows in ranks])[list(order)]
    length = ranks[0].sample.length
    assert positions.tolist() == [*range(length)] * (views + 1)
    assert copies.tolist() == [copy for copy in (*range(views), CLEAN) for _ in range(length)]
    assert (plan.num_rows, plan.exchanges, len(plan.blocks)) == ((views + 1) * length, False, views * length // 4)


def test_chunks_know_the_documents_that_they_have_rows_of() -> None:
    documents = np.array([(4, 11), (12, 16), (16, 22)])
    sharding = Sharding(2, CSBP)
    plans = [plan_from_rows(RankRows(Sample(32, 4, documents=documents), sharding, rank)) for rank in range(2)]
    starts = {chunk.start: chunk.document_starts for plan in plans for chunk in plan.chunks}
    assert starts == {0: (0, 4), 8: (4, 12), 16: (16,), 24: (16,)}
    assert [block.start for plan in plans for block in plan.blocks] == [4, 8, 12, 16, 20]


def test_active_blocks_that_are_balanced_over_ranks_are_refused_and_those_at_home_are_not() -> None:
    sample = Sample(32, 4, active=np.array([[False, False, True, True, True, True, False, False]]))
    with pytest.raises(ValueError, match="is not on the rank of its clean chunk"):
        plan_from_rows(rank_rows(sample, Sharding(2, CSBP), 0))
    plans = [plan_from_rows(rank_rows(sample, Sharding(2, CSBP, keeps_blocks_home=True), rank)) for rank in range(2)]
    assert [[block.start for block in plan.blocks] for plan in plans] == [[], [8, 12, 16, 20]]


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
