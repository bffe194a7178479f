# SPDX-License-Identifier: Apache-2.0
"""Plans against the mask written out in full, and their figures against closed forms."""

import time
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_csbp.transformer.attention_plan import AttentionPlan, CleanAttention, allowed_pairs, gather_slot
from megatron_csbp.transformer.layout import BlockAssignment, Scheme, SequenceLayout, Stream
from megatron_csbp.transformer.tile import KeySource, MaskKind, Tile, TileKind

from tests.support.attention_cases import DISTRIBUTED_SCHEMES, Case
from tests.support.dense_oracle import allowed_mask, whole_rows

EXCHANGING = (Scheme.CONTEXT_PARALLEL, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL)

distributed_cases = st.builds(
    Case,
    scheme=st.sampled_from(DISTRIBUTED_SCHEMES),
    group_size=st.integers(2, 6),
    block_size=st.integers(1, 5),
    blocks_per_chunk=st.integers(1, 9),
    clean_attention=st.sampled_from(CleanAttention),
    assignment=st.sampled_from(BlockAssignment),
)
single_cases = st.builds(
    Case,
    scheme=st.just(Scheme.SINGLE),
    group_size=st.just(1),
    block_size=st.integers(1, 6),
    blocks_per_chunk=st.integers(1, 40),
    clean_attention=st.sampled_from(CleanAttention),
)
cases = distributed_cases | single_cases


def key_rows(plan: AttentionPlan, tile: Tile) -> npt.NDArray[np.int64]:
    """The whole row that each key of a tile is, [runs, keys]."""
    layout, chunk = plan.layout, plan.layout.chunk_length
    if tile.key_source is KeySource.LOCAL:
        return whole_rows(layout).numpy()[tile.key.rows()]
    gathered = np.empty(layout.sequence_length, dtype=np.int64)
    for position in range(0, layout.sequence_length, chunk):
        slot = gather_slot(layout, position // chunk)
        gathered[slot * chunk : (slot + 1) * chunk] = layout.sequence_length + position + np.arange(chunk)
    return gathered[tile.key.rows()]


def covered_pairs(plan: AttentionPlan) -> npt.NDArray[np.int64]:
    """How often a plan computes each (query, key) pair of whole rows, [2L, 2L]."""
    length = plan.layout.sequence_length
    count = np.zeros((2 * length, 2 * length), dtype=np.int64)
    for tile in plan.tiles:
        queries, keys = whole_rows(plan.layout).numpy()[tile.query.rows()], key_rows(plan, tile)
        assert queries.shape[0] == keys.shape[0] == tile.query.num_runs == tile.key.num_runs
        pairs = np.ones((queries.shape[1], keys.shape[1]), dtype=np.int64)
        if tile.mask is MaskKind.CAUSAL:
            assert queries.shape == keys.shape
            pairs = np.tril(pairs)
        assert tile.num_pairs == queries.shape[0] * pairs.sum()
        np.add.at(count, (queries[:, :, None], keys[:, None, :]), pairs)
    return count


@given(cases)
@settings(max_examples=120)
def test_every_allowed_pair_is_computed_exactly_once_and_no_other(case: Case) -> None:
    plans = [case.plan(rank) for rank in range(case.group_size)]
    allowed = allowed_mask(case.sequence_length, case.block_size, case.clean_attention).numpy().astype(np.int64)
    if case.scheme is Scheme.BLOCK_PARALLEL:
        for plan in plans:
            held = whole_rows(plan.layout).numpy()
            assert (covered_pairs(plan)[held] == allowed[held]).all()
            assert covered_pairs(plan).sum() == allowed[held].sum() == plan.num_pairs
        return
    assert (sum(covered_pairs(plan) for plan in plans) == allowed).all()
    expected = allowed_pairs(case.sequence_length, case.block_size, case.clean_attention)
    assert sum(plan.num_pairs for plan in plans) == expected == allowed.sum()


@given(cases)
@settings(max_examples=60)
def test_without_clean_queries_the_pairs_of_corrupted_rows_remain(case: Case) -> None:
    for rank in range(case.group_size):
        plan = case.plan(rank)
        pairs = covered_pairs(plan)
        pairs[case.sequence_length :] = 0
        assert (covered_pairs(replace(plan, clean_queries=False)) == pairs).all()


@given(cases)
@settings(max_examples=50)
def test_the_first_tiles_write_every_row_once_and_come_before_all_others(case: Case) -> None:
    for rank in range(case.group_size):
        plan = case.plan(rank)
        first = [tile.writes_first for tile in plan.tiles]
        assert first == sorted(first, reverse=True)
        written = np.concatenate([tile.query.rows().reshape(-1) for tile in plan.tiles if tile.writes_first])
        assert sorted(written) == list(range(plan.layout.num_rows))


@given(distributed_cases)
@settings(max_examples=50)
def test_only_prefix_tiles_of_exchanging_schemes_need_remote_keys(case: Case) -> None:
    for rank in range(case.group_size):
        plan = case.plan(rank)
        assert {tile.key_source for tile in plan.local_tiles} == {KeySource.LOCAL}
        assert all(tile.kind is TileKind.PREFIX for tile in plan.gathered_tiles)
        assert all(tile.key_source is KeySource.GATHERED for tile in plan.gathered_tiles)
        assert bool(plan.gathered_tiles) <= (case.scheme in EXCHANGING)


@given(cases)
@settings(max_examples=50)
def test_backward_runs_each_local_tile_once_with_corrupted_keys_before_the_scatter(case: Case) -> None:
    plan = case.plan(case.group_size - 1)
    beside_gather, beside_scatter = plan.backward_local_tiles
    assert sorted((*beside_gather, *beside_scatter), key=str) == sorted(plan.local_tiles, key=str)
    corrupted = set(np.flatnonzero(plan.layout.is_corrupted))
    assert all(corrupted.isdisjoint(tile.key.rows().reshape(-1)) for tile in beside_scatter)


@pytest.mark.parametrize("scheme", EXCHANGING)
@settings(max_examples=25)
@given(group_size=st.integers(2, 4096), assignment=st.sampled_from(BlockAssignment))
def test_gather_slots_are_the_ranks_late_chunks_then_their_early_chunks(
    scheme: Scheme, group_size: int, assignment: BlockAssignment
) -> None:
    case = Case(scheme=scheme, group_size=group_size, blocks_per_chunk=1, assignment=assignment)
    by_rank = [case.layout(rank).chunks for rank in range(group_size)]
    in_slot_order = [late for _, late in by_rank] + [early for early, _ in by_rank]
    assert [gather_slot(case.layout(0), chunk) for chunk in in_slot_order] == list(range(2 * group_size))


@pytest.mark.parametrize("scheme", EXCHANGING)
@settings(max_examples=25)
@given(group_size=st.integers(2, 4096), data=st.data())
def test_dual_end_needs_one_contiguous_slice_of_the_buffer_for_each_prefix(
    scheme: Scheme, group_size: int, data: st.DataObject
) -> None:
    case = Case(scheme=scheme, group_size=group_size, blocks_per_chunk=2)
    plan = case.plan(rank := data.draw(st.integers(0, group_size - 1)))
    chunk = plan.layout.chunk_length
    early, late = (
        (rank, group_size * chunk, rank * chunk),
        (None, (rank + 1) * chunk, (2 * group_size - 1 - rank) * chunk),
    )
    expected = [(start, length) for _, start, length in (early, late) if length]
    assert [(tile.key.start, tile.key.length) for tile in plan.gathered_tiles] == expected
    assert all(tile.query.num_runs == 1 and tile.query.length == 2 * chunk for tile in plan.gathered_tiles)


@pytest.mark.parametrize("clean_attention", CleanAttention)
def test_dual_end_balances_the_pairs_over_the_ranks(clean_attention: CleanAttention) -> None:
    case = Case(group_size=8, blocks_per_chunk=4, clean_attention=clean_attention)
    pairs = [case.plan(rank).num_pairs for rank in range(8)]
    assert len(set(pairs)) == 1
    contiguous = replace(case, assignment=BlockAssignment.CONTIGUOUS)
    pairs = [contiguous.plan(rank).num_pairs for rank in range(8)]
    assert pairs == sorted(set(pairs))


@given(distributed_cases, st.integers(1, 8), st.integers(1, 128), st.sampled_from([2, 4, 8]), st.integers(1, 4))
def test_remote_bytes_follow_the_closed_form(
    case: Case, num_heads: int, head_dim: int, itemsize: int, micro_batch_size: int
) -> None:
    ranks, length = case.group_size, case.sequence_length
    unit = (ranks - 1) * length // ranks * 2 * num_heads * head_dim * itemsize * micro_batch_size
    expected = {
        Scheme.CONTEXT_PARALLEL: (unit, unit),
        Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL: (unit, 0),
        Scheme.BLOCK_PARALLEL: (0, 0),
    }[case.scheme]
    for rank in range(ranks):
        plan = case.plan(rank)
        got = (
            plan.remote_bytes(stream, num_heads, head_dim, itemsize, micro_batch_size)
            for stream in (Stream.CLEAN, Stream.CORRUPTED)
        )
        assert tuple(got) == expected


def test_nemotron_14b_at_256k_on_8_ranks_needs_105_gib_where_cp_needs_210() -> None:
    gib = {}
    for scheme in EXCHANGING:
        layout = SequenceLayout(sequence_length=262_144, block_size=32, group_size=8, scheme=scheme)
        plan = AttentionPlan(layout, CleanAttention.TOKEN_CAUSAL)
        unit = sum(plan.remote_bytes(stream, num_key_value_heads=8, head_dim=128, itemsize=2) for stream in Stream)
        gib[scheme] = 40 * 3 * unit / 2**30
    assert gib == {Scheme.CONTEXT_PARALLEL: 210.0, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL: 105.0}


@pytest.mark.parametrize("scheme", DISTRIBUTED_SCHEMES)
def test_planning_a_million_tokens_on_64_ranks_takes_less_than_a_second(scheme: Scheme) -> None:
    start = time.perf_counter()
    layout = SequenceLayout(sequence_length=2**20, block_size=32, group_size=64, rank=5, scheme=scheme)
    plan = AttentionPlan(layout, CleanAttention.BLOCK_CAUSAL)
    assert plan.num_pairs > 0
    assert len(plan.tiles) < 50
    assert time.perf_counter() - start < 1.0


@pytest.mark.parametrize("assignment", BlockAssignment)
@pytest.mark.parametrize("clean_attention", CleanAttention)
def test_4096_ranks_share_the_allowed_pairs(assignment: BlockAssignment, clean_attention: CleanAttention) -> None:
    case = Case(
        group_size=4096, block_size=2, blocks_per_chunk=3, assignment=assignment, clean_attention=clean_attention
    )
    sampled = [0, 1, 2047, 4094, 4095]
    pairs = {rank: case.plan(rank).num_pairs for rank in sampled}
    expected = allowed_pairs(case.sequence_length, case.block_size, clean_attention)
    if assignment is BlockAssignment.DUAL_END:
        assert set(pairs.values()) == {expected // 4096}
    else:
        # The work grows by the same step from rank to rank, so the mean of the first and the last is the mean of all.
        assert (pairs[0] + pairs[4095]) * 4096 == 2 * expected
        assert pairs[1] - pairs[0] == pairs[4095] - pairs[4094] > 0
