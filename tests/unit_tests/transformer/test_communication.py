# SPDX-License-Identifier: Apache-2.0
"""What goes on the wire: whose bytes, how many, and that the ledger and the plan say the same."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_csbp.transformer.communication import ContextGroupExchange
from megatron_csbp.transformer.geometry.key_map import gather_slot
from megatron_csbp.transformer.geometry.needs import Lowering
from megatron_csbp.transformer.geometry.scheme import CLEAN, BlockAssignment, CopyKind, Scheme
from megatron_csbp.transformer.geometry.transfers import row_bytes
from megatron_csbp.transformer.geometry.visibility import WindowAnchor
from megatron_csbp.transformer.traffic_ledger import (
    Collective,
    Direction,
    Entry,
    LayerLedger,
    TrafficLedger,
    Volume,
    Volumes,
)
from tests.support.attention_cases import DISTRIBUTED_SCHEMES, Case, attend_on_group
from tests.support.dense_oracle import whole_rows
from tests.support.plan_check import arrives
from tests.support.plan_check import whole_rows as numbered
from tests.support.simulated_group import (
    RankOfGroup,
    RenamedCollectives,
    SimulatedCollectives,
    run_ranks,
    use_simulated,
)

CSBP, CP = Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL, Scheme.CONTEXT_PARALLEL
BASE = Case(group_size=4, num_query_heads=4, num_key_value_heads=2, micro_batch_size=3)
EXCHANGING = {CP: (CopyKind.CLEAN, CopyKind.CORRUPTED), CSBP: (CopyKind.CLEAN,)}
RANGED = {
    "window of a few rows": {"window": 3, "anchor": WindowAnchor.BLOCK},
    "window over several chunks": {"window": 30},
    "documents": {"documents": ((0, 26), (28, 60), (60, 96))},
    "blocks of one chunk": {"active": ((1, 2), (0,)), "num_views": 2, "window": 9},
}


def train_step(case: Case, dtype: torch.dtype = torch.float64) -> dict[int, Volumes]:
    """Run forward and backward once as layer 5 and return what every rank's ledger says."""
    ledgers = {rank: TrafficLedger() for rank in range(case.group_size)}

    def make_exchange(member: RankOfGroup) -> ContextGroupExchange:
        exchange = ContextGroupExchange(member)
        exchange.ledger = LayerLedger(ledgers[member.rank], layer=5)
        return exchange

    attend_on_group(case, case.problem().to(dtype), make_exchange=make_exchange)
    return {rank: ledger.volumes for rank, ledger in ledgers.items()}


def bytes_of_a_row(case: Case, dtype: torch.dtype = torch.float64) -> int:
    return row_bytes(case.num_key_value_heads, case.head_dim, dtype.itemsize, case.micro_batch_size)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("assignment", BlockAssignment)
@pytest.mark.parametrize("scheme", DISTRIBUTED_SCHEMES)
def test_bytes_on_the_wire_are_those_of_the_plan_and_of_the_ledger(
    scheme: Scheme, assignment: BlockAssignment, dtype: torch.dtype, simulated_collectives: SimulatedCollectives
) -> None:
    case = replace(BASE, scheme=scheme, assignment=assignment)
    ledgers = train_step(case, dtype)
    wire: Counter[tuple[int, str]] = Counter()
    for rank, name, payload in simulated_collectives.payloads:
        # A gather delivers every other rank's input; an all-to-all, every other rank's share of one input.
        shares = case.group_size - 1 if name == "all_gather" else (case.group_size - 1) / case.group_size
        wire[rank, name] += payload.nbytes * shares
    if scheme is Scheme.BLOCK_PARALLEL:
        assert not wire
        assert not any(ledgers.values())
        return
    for rank in range(case.group_size):
        per_row = bytes_of_a_row(case, dtype)
        plan = case.plan(rank)
        unit = {copies: plan.transfer(copies).gather_bytes(per_row) for copies in CopyKind}
        assert unit[CopyKind.CLEAN] == (case.group_size - 1) * case.sequence_length // case.group_size * per_row
        assert wire[rank, "all_gather"] == 2 * sum(unit.values())
        assert wire[rank, "all_to_all"] == sum(unit.values())
        assert ledgers[rank] == {
            Entry(5, copies, collective, direction): Volume(1, unit[copies] * 4 // 3, unit[copies])
            for copies in EXCHANGING[scheme]
            for collective, direction in (
                (Collective.GATHER, Direction.FORWARD),
                (Collective.GATHER, Direction.BACKWARD),
                (Collective.REDUCE_SCATTER, Direction.BACKWARD),
            )
        }
        assert (unit[CopyKind.CORRUPTED] == 0) == (scheme is CSBP)


@pytest.mark.parametrize("name", RANGED)
@pytest.mark.parametrize("scheme", EXCHANGING)
def test_ranges_carry_the_rows_that_the_plan_says_and_the_ledger_knows_each_byte(
    scheme: Scheme, name: str, simulated_collectives: SimulatedCollectives
) -> None:
    case = replace(BASE, scheme=scheme, micro_batch_size=1, **RANGED[name])
    ledgers = train_step(case)
    sent: Counter[int] = Counter()
    for rank, collective, payload in simulated_collectives.payloads:
        assert collective == "all_to_all"
        sent[rank] += payload.nbytes
    plans = [case.plan(rank) for rank in range(case.group_size)]
    per_row, moved = bytes_of_a_row(case), 0
    for rank, plan in enumerate(plans):
        assert plan.clean.lowering in (Lowering.RANGES, Lowering.NEIGHBOUR)
        expected = sum(2 * t.reduce_bytes(per_row) + t.gather_bytes(per_row) for _, t in plan.transfers)
        assert sent[rank] == expected, "twice what this rank sends, once what it gives back"
        for copies, transfer in plan.transfers:
            gathered, reduced = transfer.gather_bytes(per_row), transfer.reduce_bytes(per_row)
            moved += gathered
            forward = Entry(5, copies, Collective.GATHER, Direction.FORWARD)
            assert ledgers[rank][forward] == Volume(1, gathered, gathered)
            assert ledgers[rank][replace(forward, direction=Direction.BACKWARD)] == Volume(1, gathered, gathered)
            scatter = Entry(5, copies, Collective.REDUCE_SCATTER, Direction.BACKWARD)
            assert ledgers[rank][scatter] == Volume(1, reduced, reduced)
        assert len(ledgers[rank]) == 3 * len(plan.transfers)
    assert moved == sum(t.reduce_bytes(per_row) for plan in plans for _, t in plan.transfers) > 0


def values_of(payloads: list[tuple[int, str, Tensor]], name: str) -> set[float]:
    return {number for _, kind, payload in payloads if kind == name for number in payload.flatten().tolist()}


@pytest.mark.parametrize("scheme", EXCHANGING)
def test_no_corrupted_key_value_or_gradient_is_sent_under_csbp_and_all_are_under_cp(
    scheme: Scheme, simulated_collectives: SimulatedCollectives
) -> None:
    case = replace(BASE, scheme=scheme)
    problem = case.problem()
    result = attend_on_group(case, problem)
    gathered = values_of(simulated_collectives.payloads, "all_gather")
    scattered = values_of(simulated_collectives.payloads, "all_to_all") - {0.0}
    half = case.sequence_length
    corrupted = {number for t in (problem.key, problem.value) for number in t[:half].flatten().tolist()}
    clean = {number for t in (problem.key, problem.value) for number in t[half:].flatten().tolist()}
    corrupted_grads = {number for t in (result.dk, result.dv) for number in t[:half].flatten().tolist()}
    assert clean <= gathered
    if scheme is CP:
        assert gathered == clean | corrupted
        assert corrupted_grads <= scattered
    else:
        assert gathered == clean
        assert not corrupted_grads & scattered


def numbered_rows(case: Case, member: RankOfGroup) -> Tensor:
    """Local rows [S, B, K, D] in which every number is the whole row that holds it."""
    rows = whole_rows(case.rows(member.rank)).to(torch.float64)
    return rows[:, None, None, None].expand(-1, case.micro_batch_size, case.num_key_value_heads, case.head_dim)


@pytest.mark.parametrize("names", [SimulatedCollectives, RenamedCollectives], ids=["torch-2.9", "torch-2.14"])
@pytest.mark.parametrize("changes", [{}, {"num_views": 2}, *RANGED.values()], ids=["static", "views", *RANGED])
@pytest.mark.parametrize("scheme", EXCHANGING)
def test_a_gather_brings_what_the_plan_says(
    scheme: Scheme,
    changes: dict[str, object],
    names: type[SimulatedCollectives],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_simulated(names(), monkeypatch)
    case = replace(BASE, scheme=scheme, **changes)  # type: ignore[arg-type]
    plans = [case.plan(rank) for rank in range(case.group_size)]

    def run(member: RankOfGroup) -> list[list[Tensor]]:
        local = numbered_rows(case, member)
        pendings = ContextGroupExchange(member).start_gathers([local, -local], plans[member.rank].transfers)
        return [pending.wait() for pending in pendings]

    everyone = [numbered(plan.rows) for plan in plans]
    for rank, buffers in enumerate(run_ranks(case.group_size, run)):
        assert len(buffers) == len(plans[rank].transfers) == len(EXCHANGING[scheme])
        for (copies, _), (key, value) in zip(plans[rank].transfers, buffers, strict=True):
            transfers = {one: plan.transfer(copies) for one, plan in enumerate(plans)}
            expected = torch.from_numpy(arrives(transfers, dict(enumerate(everyone)), rank))
            real = expected >= 0  # a shorter part is padded
            assert key.shape == (len(expected), 3 if not changes else case.micro_batch_size, 2, 8)
            assert torch.equal(key[real, 0, 0, 0], expected[real].double())
            assert torch.equal(key, key[:, :1, :1, :1].expand_as(key))
            assert torch.equal(value[real], -key[real])


@pytest.mark.parametrize("assignment", BlockAssignment)
def test_an_all_gather_puts_every_chunk_into_its_slot(
    assignment: BlockAssignment, simulated_collectives: SimulatedCollectives
) -> None:
    case = replace(BASE, assignment=assignment)
    rows = case.rows(0)

    def run(member: RankOfGroup) -> Tensor:
        transfers = case.plan(member.rank).transfers
        (pending,) = ContextGroupExchange(member).start_gathers([numbered_rows(case, member)], transfers)
        return pending.wait()[0]

    for key in run_ranks(case.group_size, run):
        slots = key[:, 0, 0, 0].unflatten(0, (rows.sharding.num_chunks, rows.chunk_length))
        for chunk in range(rows.sharding.num_chunks):
            start = case.sequence_length + chunk * rows.chunk_length
            assert slots[gather_slot(rows, chunk)].tolist() == list(range(start, start + rows.chunk_length))


@pytest.mark.parametrize("names", [SimulatedCollectives, RenamedCollectives], ids=["torch-2.9", "torch-2.14"])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("changes", [{}, *RANGED.values()], ids=["static", *RANGED])
def test_a_reduction_adds_to_each_row_what_every_rank_has_for_it(
    changes: dict[str, object], backend: str, names: type[SimulatedCollectives], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_simulated(names(backend=backend), monkeypatch)
    case = replace(BASE, **changes)  # type: ignore[arg-type]
    plans = [case.plan(rank) for rank in range(case.group_size)]
    everyone = [numbered(plan.rows) for plan in plans]
    transfers = {rank: plan.clean for rank, plan in enumerate(plans)}
    arrived = [arrives(transfers, dict(enumerate(everyone)), rank) for rank in transfers]

    def run(member: RankOfGroup) -> list[Tensor]:
        # Rank r has 10^r for each row that it was sent, and rows hold 1 already.
        buffer = torch.full((len(arrived[member.rank]), case.micro_batch_size, 2, 8), 10.0**member.rank).double()
        totals = [torch.ones(plans[member.rank].rows.num_rows, case.micro_batch_size, 2, 8).double() for _ in range(2)]
        transfers = plans[member.rank].transfers
        pendings = ContextGroupExchange(member).start_reduces([[buffer, -buffer]], totals, transfers, torch.float64)
        for pending in pendings:
            pending.wait()
        return totals

    for rank, (key, value) in enumerate(run_ranks(case.group_size, run)):
        for local, whole in enumerate(everyone[rank].tolist()):
            clean = int(plans[rank].rows.copies[local]) == CLEAN
            share = sum(10.0**other for other in range(case.group_size) if clean and whole in arrived[other])
            assert key[local].unique().tolist() == [1 + share]
            assert value[local].unique().tolist() == [1 - share]


@pytest.mark.parametrize("changes", [{}, {"window": 7}], ids=["all-gather", "ranges"])
def test_gradients_cross_in_the_payload_dtype_and_are_summed_in_that_of_the_totals(
    changes: dict[str, object], simulated_collectives: SimulatedCollectives
) -> None:
    case = replace(BASE, **changes)  # type: ignore[arg-type]
    plans = [case.plan(rank) for rank in range(4)]

    def run(member: RankOfGroup) -> Tensor:
        plan = plans[member.rank]
        buffer = torch.full((plan.clean.num_rows, 3, 2, 8), 256.0 if member.rank == 0 else 1.0)
        total = torch.full((plan.rows.num_rows, 3, 2, 8), 0.5)
        (pending,) = ContextGroupExchange(member).start_reduces([[buffer]], [total], plan.transfers, torch.bfloat16)
        pending.wait()
        assert total.dtype is torch.float32
        return total

    results = run_ranks(4, run)
    if not changes:
        for rank, total in enumerate(results):
            clean = torch.from_numpy(plans[rank].rows.copies == CLEAN)
            assert total[clean].unique().tolist() == [259.5]  # not a bf16 number: 256 + 1 would stay 256 in bf16
            assert total[~clean].unique().tolist() == [0.5]
    else:
        assert {number for total in results for number in total.unique().tolist()} >= {0.5, 1.5, 256.5}
    assert {payload.dtype for _, _, payload in simulated_collectives.payloads} == {torch.bfloat16}


def test_a_chunk_of_a_contiguous_tensor_goes_on_the_wire_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts that the transfer names are views of the tensor."""
    given: list[Tensor] = []

    class Spying(RenamedCollectives):
        def all_gather_single(self, out: Tensor, sent: Tensor, group: RankOfGroup, async_op: bool) -> object:
            given.append(sent)
            return super().all_gather_single(out, sent, group, async_op)

    use_simulated(Spying(), monkeypatch)
    plan = BASE.plan(1)

    def run(member: RankOfGroup) -> int:
        tensor = torch.empty(plan.rows.num_rows, 3, 2, 8)
        (pending,) = ContextGroupExchange(member).start_gathers([tensor], BASE.plan(member.rank).transfers)
        pending.wait()
        return tensor.untyped_storage().data_ptr()

    tensors = run_ranks(4, run)
    assert len(given) == 8
    assert {sent.untyped_storage().data_ptr() for sent in given} == set(tensors)
