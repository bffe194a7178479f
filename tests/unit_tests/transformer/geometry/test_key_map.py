# SPDX-License-Identifier: Apache-2.0
"""Where clean keys lie: among this rank's rows, or in the buffer of gathered ones."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_csbp.transformer.geometry.key_map import KeyMap, gather_slot
from megatron_csbp.transformer.geometry.needs import Lowering
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import CLEAN, BlockAssignment, Scheme, Sharding
from megatron_csbp.transformer.geometry.tiles import KeySource

CSBP = Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL


@pytest.mark.parametrize("scheme", [Scheme.CONTEXT_PARALLEL, CSBP])
@settings(max_examples=20)
@given(size=st.integers(2, 4096), assignment=st.sampled_from(BlockAssignment))
def test_slots_are_the_ranks_late_chunks_then_their_early_chunks(
    scheme: Scheme, size: int, assignment: BlockAssignment
) -> None:
    sharding = Sharding(size, scheme, assignment)
    rows = RankRows(Sample(2 * size, 1), sharding, 0)
    by_rank = [sharding.chunks_of(rank) for rank in range(size)]
    in_slot_order = [late for _, late in by_rank] + [early for early, _ in by_rank]
    assert [gather_slot(rows, chunk) for chunk in in_slot_order] == list(range(2 * size))


def test_with_an_all_gather_positions_before_a_chunk_are_one_run_of_the_buffer() -> None:
    rows = RankRows(Sample(32, 2), Sharding(4, CSBP), 1)  # chunks 1 and 6 of 4 positions
    keys = KeyMap(rows, Lowering.ALL_GATHER)
    (run,) = keys.anywhere(0, 24)
    assert (run.source, run.row, run.length) == (KeySource.GATHERED, 8, 24)
    (run,) = keys.anywhere(0, 4)
    assert (run.source, run.row, run.length) == (KeySource.GATHERED, 16, 4)


def test_keys_of_the_own_chunk_are_local() -> None:
    rows = RankRows(Sample(32, 2), Sharding(4, CSBP), 1)
    keys = KeyMap(rows, Lowering.ALL_GATHER)
    assert [keys.holds(position) for position in (3, 4, 7, 8, 24, 28)] == [False, True, True, False, True, False]
    assert keys.local(5) == rows.row_of(CLEAN, 5)
    (run,) = keys.in_order(24, 27, 24)
    assert (run.source, run.row, run.start, run.stop) == (KeySource.LOCAL, rows.row_of(CLEAN, 24), 24, 27)
    before, own = keys.in_order(22, 26, 24)
    assert (before.source, before.start, before.stop) == (KeySource.GATHERED, 22, 24)
    assert (own.source, own.start, own.stop) == (KeySource.LOCAL, 24, 26)
    assert keys.home(25) == (KeySource.LOCAL, rows.row_of(CLEAN, 25), 25, 26)
    assert keys.home(8).source is KeySource.GATHERED
    assert keys.in_order(5, 5, 5) == []


def test_with_ranges_held_chunks_are_local_and_the_rest_lies_in_the_order_of_positions() -> None:
    rows = RankRows(Sample(32, 2), Sharding(4, CSBP), 1)
    keys = KeyMap(rows, Lowering.RANGES, ((2, 4), (20, 24)))
    runs = keys.in_order(2, 8, 8)
    assert [(run.source, run.row, run.start, run.stop) for run in runs] == [
        (KeySource.GATHERED, 0, 2, 4),
        (KeySource.LOCAL, rows.row_of(CLEAN, 4), 4, 8),
    ]
    (run,) = keys.in_order(21, 24, 24)
    assert (run.source, run.row) == (KeySource.GATHERED, 3)
    with pytest.raises(AssertionError, match="position 1 is not among those that are received"):
        keys.in_order(1, 3, 8)


def test_runs_that_lie_side_by_side_are_one_even_if_positions_do_not_follow() -> None:
    """Contiguous chunks 0 and 1 of rank 0 lie in slots 2 and 0, and chunk 2 in slot 3, next to chunk 0."""
    rows = RankRows(Sample(16, 2), Sharding(2, CSBP, BlockAssignment.CONTIGUOUS), 1)
    keys = KeyMap(rows, Lowering.ALL_GATHER)
    assert [(run.row, run.length) for run in keys.in_order(0, 8, 8)] == [(8, 4), (0, 4)]
    assert [(run.row, run.length) for run in keys.anywhere(0, 12)] == [(0, 4), (8, 8)]


@pytest.mark.parametrize("sharding", [Sharding(), Sharding(2, Scheme.BLOCK_PARALLEL)], ids=str)
def test_a_whole_clean_copy_is_one_run(sharding: Sharding) -> None:
    rows = RankRows(Sample(16, 2), sharding, sharding.group_size - 1)
    keys = KeyMap(rows, Lowering.NOTHING)
    (run,) = keys.in_order(3, 13, 13)
    assert (run.source, run.row, run.length) == (KeySource.LOCAL, rows.row_of(CLEAN, 3), 10)
