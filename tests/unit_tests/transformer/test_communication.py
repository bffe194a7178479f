# SPDX-License-Identifier: Apache-2.0
"""What goes on the wire: whose bytes, how many, and that the ledger and the plan say the same."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from megatron_csbp.transformer.attention_plan import gather_slot
from megatron_csbp.transformer.layout import BlockAssignment, Scheme, Stream
from torch import Tensor

from megatron_csbp.transformer.communication import ContextGroupExchange, chunk_views
from megatron_csbp.transformer.traffic_ledger import (
    Collective,
    Direction,
    LayerLedger,
    TrafficLedger,
    Transfer,
    Volume,
    Volumes,
)
from tests.support.attention_cases import DISTRIBUTED_SCHEMES, Case, attend_on_group
from tests.support.dense_oracle import whole_rows
from tests.support.simulated_group import (
    RankOfGroup,
    RenamedCollectives,
    SimulatedCollectives,
    run_ranks,
    use_simulated,
)

BASE = Case(group_size=4, num_query_heads=4, num_key_value_heads=2, micro_batch_size=3)
EXCHANGING = {
    Scheme.CONTEXT_PARALLEL: (Stream.CLEAN, Stream.CORRUPTED),
    Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL: (Stream.CLEAN,),
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
        unit = {
            stream: case.plan(rank).remote_bytes(
                stream, case.num_key_value_heads, case.head_dim, dtype.itemsize, case.micro_batch_size
            )
            for stream in Stream
        }
        assert wire[rank, "all_gather"] == 2 * sum(unit.values())
        assert wire[rank, "all_to_all"] == sum(unit.values())
        assert ledgers[rank] == {
            Transfer(5, stream, collective, direction): Volume(1, unit[stream] * 4 // 3, unit[stream])
            for stream in EXCHANGING[scheme]
            for collective, direction in (
                (Collective.GATHER, Direction.FORWARD),
                (Collective.GATHER, Direction.BACKWARD),
                (Collective.REDUCE_SCATTER, Direction.BACKWARD),
            )
        }
        assert (unit[Stream.CORRUPTED] == 0) == (scheme is Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL)


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
    if scheme is Scheme.CONTEXT_PARALLEL:
        assert gathered == clean | corrupted
        assert corrupted_grads <= scattered
    else:
        assert gathered == clean
        assert not corrupted_grads & scattered


def chunk_filled(case: Case, member: RankOfGroup) -> Tensor:
    """Local rows [S, B, K, D] in which every number is the whole row that holds it."""
    rows = whole_rows(case.layout(member.rank)).to(torch.float64)
    return rows[:, None, None, None].expand(-1, case.micro_batch_size, case.num_key_value_heads, case.head_dim)


@pytest.mark.parametrize("names", [SimulatedCollectives, RenamedCollectives], ids=["torch-2.9", "torch-2.14"])
@pytest.mark.parametrize("assignment", BlockAssignment)
@pytest.mark.parametrize("stream", Stream)
def test_a_gather_puts_every_chunk_into_its_slot(
    stream: Stream,
    assignment: BlockAssignment,
    names: type[SimulatedCollectives],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_simulated(names(), monkeypatch)
    case = replace(BASE, assignment=assignment)
    layout = case.layout(0)

    def run(member: RankOfGroup) -> list[Tensor]:
        local = chunk_filled(case, member)
        exchange = ContextGroupExchange(member)
        return exchange.start_gather([local, -local], case.layout(member.rank), stream).wait()

    first_row = case.sequence_length if stream is Stream.CLEAN else 0
    for key, value in run_ranks(case.group_size, run):
        slots = key[:, 0, 0, 0].unflatten(0, (layout.num_chunks, layout.chunk_length))
        for chunk in range(layout.num_chunks):
            start = first_row + chunk * layout.chunk_length
            assert slots[gather_slot(layout, chunk)].tolist() == list(range(start, start + layout.chunk_length))
        assert torch.equal(key, key[:, :1, :1, :1].expand_as(key))
        assert torch.equal(value, -key)


@pytest.mark.parametrize("names", [SimulatedCollectives, RenamedCollectives], ids=["torch-2.9", "torch-2.14"])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_reduce_scatter_returns_this_ranks_sums_early_chunk_first(
    backend: str, names: type[SimulatedCollectives], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_simulated(names(backend=backend), monkeypatch)
    layout = BASE.layout(0)

    def run(member: RankOfGroup) -> list[Tensor]:
        slots = torch.arange(layout.num_chunks, dtype=torch.float64).repeat_interleave(layout.chunk_length)
        buffer = (slots + 100 * 10**member.rank)[:, None, None, None].repeat(1, 3, 2, 8)
        exchange = ContextGroupExchange(member)
        pending = exchange.start_reduce_scatter([buffer], BASE.layout(member.rank), Stream.CLEAN, torch.float64)
        return pending.wait()

    for rank, (result,) in enumerate(run_ranks(4, run)):
        assert result.shape == (2, layout.chunk_length, 3, 2, 8)
        for index, chunk in enumerate(BASE.layout(rank).chunks):
            assert result[index].unique().tolist() == [4 * gather_slot(layout, chunk) + 111_100]


def test_gradients_cross_in_the_payload_dtype_and_are_summed_in_the_buffers(
    simulated_collectives: SimulatedCollectives,
) -> None:
    def run(member: RankOfGroup) -> Tensor:
        buffer = torch.full((BASE.sequence_length, 3, 2, 8), 256.0 if member.rank == 0 else 1.0)
        exchange = ContextGroupExchange(member)
        layout = BASE.layout(member.rank)
        return exchange.start_reduce_scatter([buffer], layout, Stream.CLEAN, torch.bfloat16).wait()[0]

    for result in run_ranks(4, run):
        assert result.dtype is torch.float32
        assert result.unique().tolist() == [259.0]  # not a bf16 number: 256 + 1 would stay 256 in bf16
    assert {payload.dtype for _, _, payload in simulated_collectives.payloads} == {torch.bfloat16}


def test_a_chunk_of_a_contiguous_tensor_goes_on_the_wire_without_a_copy() -> None:
    layout = BASE.layout(1)
    tensor = torch.empty(layout.num_rows, 3, 2, 8)
    for stream in Stream:
        for chunk, view in zip(layout.chunks, chunk_views(tensor, layout, stream), strict=True):
            assert view.is_contiguous()
            assert view.data_ptr() == tensor[layout.first_row(stream, chunk)].data_ptr()
