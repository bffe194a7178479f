# SPDX-License-Identifier: Apache-2.0
"""The rows of a rank: their order, their positions, and that every row of a copy counts once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_csbp.transformer.geometry.ownership import balanced_owners
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import CLEAN, BlockAssignment, Scheme, Sharding
from tests.support.geometry_cases import groups
from tests.support.plan_check import Group

CSBP = Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL
small_groups = groups(st.sampled_from([1, 2, 3, 4]), 5, 4)


def layout_of(rows: RankRows) -> list[tuple[int, int, int]]:
    return [(span.copy, span.start, span.stop) for span in rows.spans]


def test_the_early_chunk_comes_first_and_in_it_the_views_and_then_the_clean_rows() -> None:
    rows = RankRows(Sample(16, 2, 2), Sharding(2, CSBP), 1)
    assert layout_of(rows) == [
        (0, 4, 8), (1, 4, 8), (CLEAN, 4, 8), (0, 8, 12), (1, 8, 12), (CLEAN, 8, 12),
    ]  # fmt: skip
    assert rows.num_rows == 24
    assert rows.num_corrupted_rows == 16
    assert rows.chunk_length == 4
    assert rows.chunks == (1, 2)


def test_pure_bp_has_its_corrupted_chunks_and_then_the_whole_clean_copy() -> None:
    rows = RankRows(Sample(16, 2), Sharding(2, Scheme.BLOCK_PARALLEL), 0)
    assert layout_of(rows) == [(0, 0, 4), (0, 12, 16), (CLEAN, 0, 16)]
    assert rows.is_counted.tolist() == [True] * 8 + [True] * 4 + [False] * 8 + [True] * 4
    assert all(rows.holds_clean(chunk) for chunk in range(4))


def test_blocks_of_other_chunks_come_last_view_by_view() -> None:
    sample = Sample(16, 2, 2, active=np.ones((2, 8)))
    owners = np.array([[1, 0, 0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 1, 0, 0]])
    rows = RankRows(sample, Sharding(2, CSBP), 1, owners)
    assert layout_of(rows) == [(CLEAN, 4, 8), (1, 10, 12), (CLEAN, 8, 12), (0, 0, 2), (1, 0, 2)]
    assert [span.chunk for span in rows.spans] == [1, 2, 2, 0, 0]
    assert [rows.holds_clean(chunk) for chunk in range(4)] == [False, True, True, False]
    home = RankRows(sample, Sharding(2, CSBP), 1)
    assert [span.copy for span in home.spans] == [0, 1, CLEAN, 0, 1, CLEAN]


def test_only_active_blocks_have_rows() -> None:
    sample = Sample(16, 2, active=np.array([[True, True, False, True, False, False, False, False]]))
    assert layout_of(RankRows(sample, Sharding())) == [(0, 0, 4), (0, 6, 8), (CLEAN, 0, 16)]


@given(small_groups)
@settings(max_examples=80)
def test_rows_are_spans_of_consecutive_positions(group: Group) -> None:
    for plan in group.plans:
        rows = plan.rows
        assert [span.first_row for span in rows.spans] == np.cumsum([0, *(s.length for s in rows.spans)])[:-1].tolist()
        assert len(rows.sample_positions) == len(rows.copies) == rows.num_rows
        assert rows.num_corrupted_rows == rows.is_corrupted.sum()
        for span in rows.spans:
            own = slice(span.first_row, span.first_row + span.length)
            assert rows.sample_positions[own].tolist() == list(range(span.start, span.stop))
            assert (rows.copies[own] == span.copy).all()
            assert rows.row_of(span.copy, span.stop - 1) == span.first_row + span.length - 1


@given(small_groups)
@settings(max_examples=80)
def test_positions_restart_in_each_document_and_are_the_same_for_all_copies(group: Group) -> None:
    sample = group.sample
    for rows in (plan.rows for plan in group.plans):
        for position, restarted, stop in zip(
            rows.sample_positions.tolist(), rows.positions.tolist(), rows.document_stops.tolist(), strict=True
        ):
            before = [(first, last) for first, last in sample.documents.tolist() if first <= position]
            first, last = before[-1] if before else (position, sample.documents[0, 1])
            assert restarted == position - first
            assert stop == last


@pytest.mark.parametrize("assignment", BlockAssignment)
@pytest.mark.parametrize("views", [1, 3])
def test_static_ranks_have_equally_many_rows(views: int, assignment: BlockAssignment) -> None:
    sample = Sample(96, 2, views)
    for scheme in (Scheme.CONTEXT_PARALLEL, CSBP):
        rows = {RankRows(sample, Sharding(4, scheme, assignment), rank).num_rows for rank in range(4)}
        assert rows == {(views + 1) * 96 // 4}
    pure = {RankRows(sample, Sharding(4, Scheme.BLOCK_PARALLEL, assignment), rank).num_rows for rank in range(4)}
    assert pure == {96 + views * 96 // 4}


def test_balanced_ranks_may_differ_by_one_block() -> None:
    active = np.zeros((1, 48), dtype=bool)
    active[0, :7] = True
    sample, sharding = Sample(96, 2, active=active), Sharding(4, CSBP)
    owners = balanced_owners(sample, sharding)
    assert sorted(RankRows(sample, sharding, rank, owners).num_corrupted_rows for rank in range(4)) == [2, 4, 4, 4]


def test_a_row_that_is_not_here_is_named() -> None:
    rows = RankRows(Sample(16, 2), Sharding(2, CSBP), 1)
    assert (rows.row_of(0, 5), rows.row_of(CLEAN, 8)) == (1, 12)
    with pytest.raises(KeyError, match="rank 1 holds no row of copy 0 at position 3"):
        rows.row_of(0, 3)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_is_not_there_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is not in a context group of 2 ranks"):
        RankRows(Sample(64, 4), Sharding(2, Scheme.BLOCK_PARALLEL), rank)
