# SPDX-License-Identifier: Apache-2.0
"""What is sent: closed forms of bytes, the choice of the collective, the CP baseline's corrupted rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_csbp.transformer.geometry.needs import Lowering, Needs, merge, subtract
from megatron_csbp.transformer.geometry.plan import AttentionPlan, plan_attention
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import CLEAN, BlockAssignment, CopyKind, Scheme, Sharding
from megatron_csbp.transformer.geometry.transfers import clean_transfer, row_bytes
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask, WindowAnchor
from tests.support.geometry_cases import groups
from tests.support.plan_check import Group, arrives, whole_rows

CSBP, CP, BP = Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL, Scheme.CONTEXT_PARALLEL, Scheme.BLOCK_PARALLEL
TOKEN = CleanAttention.TOKEN_CAUSAL
GIB = 2**30


def plans(
    scheme: Scheme, size: int, length: int, mask: Mask, block: int = 4, assignment: BlockAssignment | None = None
) -> list[AttentionPlan]:
    sharding = Sharding(size, scheme, assignment or BlockAssignment.DUAL_END)
    return [plan_attention(RankRows(Sample(length, block), sharding, rank), mask) for rank in range(size)]


def test_a_row_has_a_key_and_a_value_of_each_head() -> None:
    assert row_bytes(8, 128, 2) == 4096
    assert row_bytes(num_key_value_heads=2, head_dim=4, itemsize=8, micro_batch_size=3) == 384


@settings(max_examples=30)
@given(st.integers(2, 64), st.integers(1, 5), st.sampled_from(BlockAssignment))
def test_full_attention_gathers_all_other_shards(size: int, blocks: int, assignment: BlockAssignment) -> None:
    length = 2 * size * blocks * 4
    (clean, corrupted), none = ((size - 1) * length // size * 10,) * 2, 0
    for scheme, expected in ((CP, (clean, corrupted)), (CSBP, (clean, none)), (BP, (none, none))):
        sharding = Sharding(size, scheme, assignment)
        plan = plan_attention(RankRows(Sample(length, 4), sharding, size - 1), Mask(TOKEN))
        assert (plan.clean.gather_bytes(10), plan.corrupted.gather_bytes(10)) == expected
        assert (plan.clean.reduce_bytes(10), plan.corrupted.reduce_bytes(10)) == expected
        assert plan.clean.buffer_bytes(10) == (length * 10 if expected[0] else 0)


def test_nemotron_14b_at_256k_on_8_ranks_needs_105_gib_where_cp_needs_210() -> None:
    gib = {}
    for scheme in (CP, CSBP):
        plan = plan_attention(RankRows(Sample(262_144, 32), Sharding(8, scheme)), Mask(TOKEN))
        unit = sum(transfer.gather_bytes(row_bytes(8, 128, 2)) for _, transfer in plan.transfers)
        gib[scheme] = 40 * 3 * unit / GIB
    assert gib == {CP: 210.0, CSBP: 105.0}


@settings(max_examples=25)
@given(st.integers(2, 16), st.data())
def test_a_window_within_a_chunk_brings_a_halo_of_w_minus_1_rows_for_each_chunk(
    size: int, data: st.DataObject
) -> None:
    """None before the first chunk; the last rank's two chunks are neighbours, so the late one has its halo at hand."""
    chunk = 4 * data.draw(st.integers(1, 6))
    window = data.draw(st.integers(2, chunk + 1))
    anchor = data.draw(st.sampled_from(WindowAnchor))
    halo = [plan.clean.remote_rows for plan in plans(CSBP, size, 2 * size * chunk, Mask(TOKEN, window, anchor))]
    expected = [((rank > 0) + (rank < size - 1)) * (window - 1) for rank in range(size)]
    if max(expected) >= 2 * (size - 1) * chunk:
        assert set(halo) == {2 * (size - 1) * chunk}  # a gather brings no more
    else:
        assert halo == expected


@pytest.mark.parametrize("mask", [Mask(TOKEN, 1), Mask(TOKEN, 1, WindowAnchor.BLOCK)], ids=["position", "block"])
def test_a_window_of_one_row_needs_nothing(mask: Mask) -> None:
    assert {plan.clean.lowering for plan in plans(CSBP, 4, 128, mask)} == {Lowering.NOTHING}


def test_the_collective_is_the_cheapest_that_serves_the_busiest_rank() -> None:
    def lowering(window: int | None, size: int = 8) -> Lowering:
        return plans(CSBP, size, 16 * 2 * size, Mask(TOKEN, window))[3 % size].clean.lowering

    # Chunks of 16 rows: w - 1 rows of the neighbours; then of several owners; then nearly all.
    assert lowering(16) is Lowering.NEIGHBOUR
    assert lowering(17) is Lowering.NEIGHBOUR
    assert lowering(30) is Lowering.RANGES
    assert lowering(250) is Lowering.ALL_GATHER
    assert lowering(None) is Lowering.ALL_GATHER
    assert lowering(31, size=2) is Lowering.NEIGHBOUR


def test_documents_that_end_inside_their_chunks_need_nothing_and_others_what_lies_before() -> None:
    def of(documents: list[tuple[int, int]]) -> list[int]:
        sample = Sample(64, 4, documents=np.array(documents))
        made = [plan_attention(RankRows(sample, Sharding(4, CSBP), rank), Mask(TOKEN)) for rank in range(4)]
        return [plan.clean.remote_rows for plan in made]

    assert of([(0, 8), (8, 15), (16, 32), (32, 40), (40, 64)]) == [16, 8, 0, 8]
    assert of([(start, start + 8) for start in range(0, 64, 8)]) == [0, 0, 0, 0]


def test_blocks_away_from_home_bring_all_that_they_see() -> None:
    sample = Sample(64, 4, active=np.array([[False] * 3 + [True] + [False] * 12]))
    owners = np.full((1, 16), -1)
    owners[0, 3] = 2
    rows = RankRows(sample, Sharding(4, CSBP), 2, owners)
    needs = Needs(rows, Mask(TOKEN), clean_queries=False)
    assert needs.by_rank == [[], [], [(0, 12)], []]
    transfer = clean_transfer(needs)
    assert (transfer.lowering, transfer.receive_counts) == (Lowering.NEIGHBOUR, (8, 4, 0, 0))
    windowed = Needs(rows, Mask(TOKEN, 5), clean_queries=False)
    assert windowed.by_rank == [[], [], [(8, 12)], []]


@given(groups(st.sampled_from([2, 3, 4]), 4, 4))
@settings(max_examples=100)
def test_ranks_agree_and_what_one_sends_comes_back(group: Group) -> None:
    per_row = 6
    for kind in CopyKind:
        transfers = [plan.transfer(kind) for plan in group.plans]
        rows = [whole_rows(plan.rows) for plan in group.plans]
        assert len({(transfer.lowering, transfer.part_length) for transfer in transfers}) == 1
        assert sum(t.gather_bytes(per_row) for t in transfers) == sum(t.reduce_bytes(per_row) for t in transfers)
        for rank, (plan, transfer) in enumerate(zip(group.plans, transfers, strict=True)):
            arrived = arrives(dict(enumerate(transfers)), dict(enumerate(rows)), rank)
            assert len(arrived) == transfer.num_rows
            if not transfer:
                assert transfer.remote_rows == transfer.sent_rows == 0
                continue
            clean = arrived[arrived >= 0] >= group.sample.num_views * group.sample.length
            assert clean.all() if kind is CopyKind.CLEAN else not clean.any()
            if transfer.lowering is not Lowering.ALL_GATHER:
                assert transfer.receive_counts[rank] == transfer.send_counts[rank] == 0
                assert transfer.remote_rows == len(arrived) == sum(transfer.receive_counts)
                assert len(np.unique(arrived)) == len(arrived), "a row comes twice"
                assert not np.isin(arrived, rows[rank]).any(), "a row comes that is here"
            if kind is CopyKind.CLEAN and transfer.lowering is not Lowering.ALL_GATHER:
                assert (np.diff(arrived) > 0).all(), "in the order of positions"
            if kind is CopyKind.CORRUPTED:
                assert group.sharding.scheme is CP
                held = np.concatenate(
                    [r[plan.rows.copies != CLEAN] for r, plan in zip(rows, group.plans, strict=True)]
                )
                assert np.isin(arrived[arrived >= 0], held).all()


def test_the_cp_baseline_sends_corrupted_rows_where_it_sends_clean_ones() -> None:
    for mask in (Mask(TOKEN), Mask(TOKEN, 9)):
        for views in (1, 2):
            sample = Sample(64, 4, views)
            for rank in range(2):
                plan = plan_attention(RankRows(sample, Sharding(2, CP), rank), mask)
                assert plan.corrupted.lowering is plan.clean.lowering
                assert plan.corrupted.remote_rows == views * plan.clean.remote_rows > 0


def test_the_cp_baseline_pads_chunks_with_fewer_active_blocks() -> None:
    active = np.zeros((1, 16), dtype=bool)
    active[0, [0, 1, 9]] = True  # two in the first chunk, one in the third
    everyone = [RankRows(Sample(64, 4, active=active), Sharding(2, CP), rank) for rank in range(2)]
    corrupted = [plan_attention(rows, Mask(TOKEN)).corrupted for rows in everyone]
    assert [t.part_length for t in corrupted] == [8, 8]
    assert [t.parts for t in corrupted] == [((0, 0), (0, 8)), ((16, 4), (0, 0))]
    none = RankRows(Sample(64, 4, active=np.zeros((1, 16))), Sharding(2, CP), 0)
    assert not plan_attention(none, Mask(TOKEN)).corrupted


def test_intervals_are_merged_and_cut() -> None:
    assert merge([(5, 7), (0, 2), (2, 3), (6, 9), (4, 4)]) == [(0, 3), (5, 9)]
    assert merge([(0, 9), (2, 3)]) == [(0, 9)]
    assert subtract([(0, 10), (20, 30)], [(2, 4), (8, 22)]) == [(0, 2), (4, 8), (22, 30)]
    assert subtract([(0, 10)], [(0, 10)]) == []
    assert subtract([(0, 10)], [(10, 12)]) == [(0, 10)]


@pytest.mark.parametrize("clean_attention", CleanAttention)
def test_the_layers_of_diffusiongemma_at_256k_on_8_ranks(clean_attention: CleanAttention) -> None:
    """25 layers with a window of 1024 (8 heads of 256), 5 full ones (2 of 512); bf16; gathered twice, summed once.

    The fair baseline is CP with halos too: twice CSBP's bytes. Most of the distance to a CP of whole shards is halos.
    """
    window, full = Mask(clean_attention, 1024, WindowAnchor.BLOCK), Mask(clean_attention)

    def gib(scheme: Scheme, of_windows: Mask) -> float:
        total = 0
        for mask, layers, per_row in ((of_windows, 25, row_bytes(8, 256, 2)), (full, 5, row_bytes(2, 512, 2))):
            for plan in plans(scheme, 8, 262_144, mask, block=256):
                for _, transfer in plan.transfers:
                    total += layers * (2 * transfer.gather_bytes(per_row) + transfer.reduce_bytes(per_row))
        return total / 8 / GIB

    halo = [plan.clean.remote_rows for plan in plans(CSBP, 8, 262_144, window, block=256)]
    assert halo == [1023, *[2046] * 6, 1023]
    ours, with_halos, whole_shards = gib(CSBP, window), gib(CP, window), gib(CP, full)
    assert round(ours, 2) == 14.15
    assert round(with_halos, 2) == 28.30
    assert with_halos == 2 * ours
    assert whole_shards == 288.75
