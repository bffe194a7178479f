# SPDX-License-Identifier: Apache-2.0
"""Plans against the mask written out in full, whatever the sample, the mask and the group."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_csbp.transformer.geometry.needs import Lowering, Needs
from megatron_csbp.transformer.geometry.plan import AttentionPlan, plan_attention
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import BlockAssignment, CopyKind, Scheme, Sharding
from megatron_csbp.transformer.geometry.tiles import KeySource
from megatron_csbp.transformer.geometry.transfers import clean_transfer
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask, WindowAnchor, allowed_pairs
from tests.support.geometry_cases import SCHEMES, groups
from tests.support.plan_check import Group, arrives, check_group, check_tiles, computed_pairs, whole_rows
from tests.support.written_out_mask import written_out

CSBP = Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL


@given(groups(st.sampled_from([1, 2, 3, 4]), 6, 5))
@settings(max_examples=250)
def test_every_allowed_pair_is_computed_exactly_once_and_no_other(group: Group) -> None:
    check_group(group)


@given(groups(st.sampled_from([8, 16]), 3, 3))
@settings(max_examples=40)
def test_so_on_larger_groups(group: Group) -> None:
    check_group(group)


@given(groups(st.sampled_from([17, 32, 64]), 1, 2))
@settings(max_examples=6)
def test_so_up_to_64_ranks(group: Group) -> None:
    check_group(group)


@given(groups(st.just(1), 40, 3))
@settings(max_examples=60)
def test_so_with_many_blocks_on_one_rank(group: Group) -> None:
    check_group(group)


@pytest.mark.parametrize("assignment", BlockAssignment)
@pytest.mark.parametrize("clean_attention", CleanAttention)
def test_so_on_some_of_4096_ranks(clean_attention: CleanAttention, assignment: BlockAssignment) -> None:
    mask = Mask(clean_attention)
    sample, sharding = Sample(2 * 4096 * 3 * 2, 2), Sharding(4096, CSBP, assignment)
    everyone = [RankRows(sample, sharding, rank) for rank in range(4096)]
    transfers = [clean_transfer(Needs(rows, mask)) for rows in everyone]
    whole = {rank: whole_rows(rows) for rank, rows in enumerate(everyone)}
    gathered = arrives(dict(enumerate(transfers)), whole, 0)
    expected, pairs = allowed_pairs(sample, mask), {}
    for rank in (0, 1, 2047, 4094, 4095):
        plan = plan_attention(everyone[rank], mask)
        check_tiles(plan)
        rows = zip(plan.rows.copies.tolist(), plan.rows.sample_positions.tolist(), strict=True)
        assert (computed_pairs(plan, gathered) == written_out(sample, mask, rows)).all()
        pairs[rank] = plan.num_pairs
    if assignment is BlockAssignment.DUAL_END:
        assert set(pairs.values()) == {expected // 4096}
    else:
        # The work grows by the same step from rank to rank, so the mean of the first and the last is the mean of all.
        assert (pairs[0] + pairs[4095]) * 4096 == 2 * expected
        assert pairs[1] - pairs[0] == pairs[4095] - pairs[4094] > 0


@pytest.mark.parametrize(
    "mask, rank",
    [
        (Mask(CleanAttention.TOKEN_CAUSAL, 1), 2047),
        (Mask(CleanAttention.TOKEN_CAUSAL, 7, WindowAnchor.BLOCK), 0),
        (Mask(CleanAttention.BLOCK_CAUSAL, 40), 4095),
    ],
)
def test_so_with_a_window_on_4096_ranks(mask: Mask, rank: int) -> None:
    """Neither the halo of a window of several chunks, nor its senders, come from elsewhere."""
    sample, sharding = Sample(2 * 4096 * 3 * 2, 2), Sharding(4096, CSBP)
    mine = plan_attention(RankRows(sample, sharding, rank), mask)
    senders = [sender for sender, count in enumerate(mine.clean.receive_counts) if count]
    assert bool(senders) == (mask.window != 1)
    rows = {one: RankRows(sample, sharding, one) for one in {*senders, rank}}
    transfers = {one: clean_transfer(Needs(own, mask)) for one, own in rows.items()}
    gathered = arrives(transfers, {one: whole_rows(own) for one, own in rows.items()}, rank)
    check_tiles(mine)
    places = zip(mine.rows.copies.tolist(), mine.rows.sample_positions.tolist(), strict=True)
    assert (computed_pairs(mine, gathered) == written_out(sample, mask, places)).all()


@given(groups(st.sampled_from([1, 2, 3, 4]), 6, 5))
@settings(max_examples=60)
def test_the_pairs_of_all_ranks_are_those_that_the_mask_allows(group: Group) -> None:
    pairs = sum(plan.num_pairs for plan in group.plans)
    if not group.sharding.clean_is_replicated:
        assert pairs == allowed_pairs(group.sample, group.mask, clean_queries=group.clean_queries)
    elif not group.clean_queries:
        assert pairs == allowed_pairs(group.sample, group.mask, clean_queries=False)
    else:  # every rank has all the clean rows
        twice = pairs - allowed_pairs(group.sample, group.mask, clean_queries=False)
        clean = allowed_pairs(group.sample, group.mask) - allowed_pairs(group.sample, group.mask, clean_queries=False)
        assert twice == group.sharding.group_size * clean


@given(groups(st.sampled_from([1, 2, 3, 4]), 5, 4))
@settings(max_examples=60)
def test_local_tiles_have_local_keys_and_first_writers_come_first(group: Group) -> None:
    for plan in group.plans:
        assert all(tile.key_source is KeySource.LOCAL for tile in plan.local_tiles)
        assert all(tile.key_source is KeySource.GATHERED for tile in plan.gathered_tiles)
        assert bool(plan.gathered_tiles) <= plan.exchanges
        first = [tile.writes_first for tile in plan.tiles]
        assert first == sorted(first, reverse=True)


@given(groups(st.sampled_from([1, 2, 3, 4]), 5, 4))
@settings(max_examples=60)
def test_backward_runs_each_local_tile_once_with_corrupted_keys_before_the_scatter(group: Group) -> None:
    for plan in group.plans:
        beside_gather, beside_scatter = plan.backward_local_tiles
        assert sorted(map(id, (*beside_gather, *beside_scatter))) == sorted(map(id, plan.local_tiles))
        corrupted = set(np.flatnonzero(plan.rows.is_corrupted).tolist())
        assert all(corrupted.isdisjoint(tile.key.rows().reshape(-1).tolist()) for tile in beside_scatter)


def test_backward_deals_local_tiles_into_halves_of_about_equal_work() -> None:
    plan = plan_attention(RankRows(Sample(2**12, 4), Sharding(2, CSBP), 0), Mask(CleanAttention.TOKEN_CAUSAL))
    early, late = (sum(tile.num_pairs for tile in half) for half in plan.backward_local_tiles)
    largest = max(tile.num_pairs for tile in plan.local_tiles)
    assert early + late == sum(tile.num_pairs for tile in plan.local_tiles)
    assert 0 <= early - late <= 2 * largest
    assert late > 0


def static_plan(size: int, rank: int, mask: Mask, *, block: int = 2, blocks: int = 4, views: int = 1) -> AttentionPlan:
    sample = Sample(2 * size * block * blocks, block, views)
    return plan_attention(RankRows(sample, Sharding(size, CSBP), rank), mask)


@settings(max_examples=25)
@given(size=st.integers(2, 4096), views=st.integers(1, 3), data=st.data())
def test_dual_end_needs_one_slice_of_the_buffer_for_each_chunks_prefix(
    size: int, views: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, size - 1))
    plan = static_plan(size, rank, Mask(CleanAttention.TOKEN_CAUSAL), views=views)
    chunk = plan.rows.chunk_length
    # Late chunks lie in the first half in rank order, early ones in the second: positions before a chunk are in line.
    expected = [(size * chunk, rank * chunk), ((rank + 1) * chunk, (2 * size - 1 - rank) * chunk)]
    assert [(t.key.start, t.key.num_rows) for t in plan.gathered_tiles] == [e for e in expected if e[1]]
    assert all(t.query.num_problems == 1 and t.query.num_rows == (views + 1) * chunk for t in plan.gathered_tiles), (
        "all copies of a chunk in one tile"
    )


@pytest.mark.parametrize("clean_attention", CleanAttention)
def test_dual_end_balances_the_pairs_over_the_ranks(clean_attention: CleanAttention) -> None:
    mask = Mask(clean_attention)
    pairs = {static_plan(8, rank, mask).num_pairs for rank in range(8)}
    assert len(pairs) == 1
    sample, sharding = Sample(128, 2), Sharding(8, CSBP, BlockAssignment.CONTIGUOUS)
    contiguous = [plan_attention(RankRows(sample, sharding, rank), mask).num_pairs for rank in range(8)]
    assert contiguous == sorted(set(contiguous))


def test_a_window_as_long_as_the_sample_is_no_window() -> None:
    for window in (64, 65, 1000):
        plan = static_plan(4, 1, Mask(CleanAttention.TOKEN_CAUSAL, window))
        assert plan.mask.window is None
        assert plan.clean.lowering is Lowering.ALL_GATHER
    assert static_plan(4, 1, Mask(CleanAttention.TOKEN_CAUSAL, 63)).mask.window == 63


def test_transfers_are_told_by_kind_of_copies_and_only_where_something_is_sent() -> None:
    sample, mask = Sample(64, 4), Mask(CleanAttention.TOKEN_CAUSAL)
    told = {}
    for scheme in SCHEMES:
        plan = plan_attention(RankRows(sample, Sharding(4, scheme), 0), mask)
        told[scheme] = [kind for kind, _ in plan.transfers]
        assert plan.exchanges == bool(plan.transfers)
        assert all(plan.transfer(kind) is transfer for kind, transfer in plan.transfers)
    assert told == {
        Scheme.CONTEXT_PARALLEL: [CopyKind.CLEAN, CopyKind.CORRUPTED],
        Scheme.BLOCK_PARALLEL: [],
        CSBP: [CopyKind.CLEAN],
    }


def test_rows_that_see_nothing_are_unwritten() -> None:
    """Padding before, between and behind documents."""
    sample = Sample(24, 4, documents=np.array([(4, 9), (16, 18)]))
    plan = plan_attention(RankRows(sample, Sharding()), Mask(CleanAttention.TOKEN_CAUSAL))
    corrupted = 3 * 4  # of blocks 1, 2 and 4
    clean = [(0, 4), (12, 16), (20, 24)]
    assert plan.unwritten == tuple((corrupted + start, corrupted + stop) for start, stop in clean)
    without = plan_attention(RankRows(sample, Sharding()), Mask(CleanAttention.TOKEN_CAUSAL), clean_queries=False)
    assert without.unwritten == ((corrupted, corrupted + 24),)


def test_clean_queries_only_leave_out_rows() -> None:
    group = Group(Sample(48, 3), Sharding(2, CSBP), Mask(CleanAttention.BLOCK_CAUSAL, 5, WindowAnchor.BLOCK))
    for plan, without in zip(group.plans, replace(group, clean_queries=False).plans, strict=True):
        assert plan.rows.num_rows == without.rows.num_rows
        assert without.num_pairs < plan.num_pairs
