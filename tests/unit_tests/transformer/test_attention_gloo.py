# SPDX-License-Identifier: Apache-2.0
"""Attention over real gloo groups of 2 and 4 ranks: one spawn collects facts about all cases; the tests judge them."""

import random
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_csbp.transformer.collectives import start_all_gathers, start_reduce_scatters
from megatron_csbp.transformer.communication import ContextGroupExchange
from megatron_csbp.transformer.geometry.scheme import BlockAssignment, CopyKind, Scheme
from megatron_csbp.transformer.geometry.transfers import row_bytes
from megatron_csbp.transformer.geometry.visibility import CleanAttention, WindowAnchor
from megatron_csbp.transformer.traffic_ledger import LayerLedger, TrafficLedger, total
from tests.support.attention_cases import DISTRIBUTED_SCHEMES, Case, add_results, attend_on_rank
from tests.support.delayed_exchange import DelayedExchange
from tests.support.dense_oracle import Result
from tests.support.gloo_ranks import facts_of_ranks

WORLD_SIZE = 4
EXCHANGING = [Scheme.CONTEXT_PARALLEL, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL]
MOST_UNDER_WAY = 8
CASES = {
    str(case): case
    for case in [
        *(
            Case(
                scheme=scheme,
                group_size=group_size,
                clean_attention=clean_attention,
                assignment=assignment,
                num_query_heads=4,
                num_key_value_heads=2,
                micro_batch_size=2,
            )
            for scheme, group_size, clean_attention, assignment in product(
                DISTRIBUTED_SCHEMES, (2, 4), CleanAttention, BlockAssignment
            )
        ),
        Case(group_size=4, block_size=48, blocks_per_chunk=1, num_query_heads=8),
        Case(group_size=4, block_size=1, blocks_per_chunk=8, num_query_heads=2, num_key_value_heads=2),
        Case(group_size=2, block_size=32, blocks_per_chunk=5),
        *(
            Case(scheme=scheme, group_size=size, window=window, anchor=anchor, num_query_heads=4, num_views=views)
            for scheme in EXCHANGING
            for size, views, window, anchor in [
                (2, 1, 3, WindowAnchor.POSITION),
                (4, 2, 7, WindowAnchor.BLOCK),
                (4, 1, 17, WindowAnchor.POSITION),
                (2, 1, 25, WindowAnchor.BLOCK),
            ]
        ),
        *(
            Case(
                scheme=scheme,
                group_size=4,
                documents=((0, 26), (28, 31), (40, 80)),
                active=active,
                num_views=2,
                window=window,
            )
            for scheme in DISTRIBUTED_SCHEMES
            for active, window in [(None, None), (((0, 1, 2), (0, 19)), None), (((), (10, 11, 12)), 9)]
        ),
    ]
}


@dataclass
class Wire(TorchDispatchMode):
    """Sees every collective that PyTorch dispatches, and adds up the bytes that it brings from other ranks."""

    group_size: int
    received_bytes: float = 0.0
    collectives: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.collectives.append(func.overloadpacket.__name__)
            # Output first, in both collectives that the exchange uses on gloo: each holds one share of every rank.
            # Equal shares with this rank's own among them, or, in ranges, the rows that others send.
            counts = args[3] if len(args) > 3 and isinstance(args[3], list) else []
            share = 1 if counts else (self.group_size - 1) / self.group_size
            self.received_bytes += args[0].nbytes * share
        return func(*args, **(kwargs or {}))


def facts_of(case: Case, group: dist.ProcessGroup) -> dict[str, Any]:
    rank = dist.get_rank(group)
    problem = case.problem()
    exchange, ledger = ContextGroupExchange(group), TrafficLedger()
    exchange.ledger = LayerLedger(ledger, layer=1)
    with Wire(case.group_size) as wire:
        share = attend_on_rank(case, problem, case.context(rank, exchange))
    shares = []
    for name in ("out", "dq", "dk", "dv"):
        everyones = [torch.empty_like(getattr(share, name)) for _ in range(case.group_size)]
        dist.all_gather(everyones, getattr(share, name), group=group)
        shares.append(everyones)
    result = add_results([Result(*tensors) for tensors in zip(*shares, strict=True)])
    errors = None
    if rank == 0:
        errors = result.max_errors(case.dense(problem), case.num_views)
    return {
        "errors": errors,
        "group_rank": rank,
        "wire_bytes": wire.received_bytes,
        "collectives": wire.collectives,
        "ledger": {
            copies: total(moved for what, moved in ledger.volumes.items() if what.copies is copies).remote_bytes
            for copies in CopyKind
        },
    }


def results_with_delays(case: Case, groups: list[dist.ProcessGroup], late: int | None) -> tuple[list[Tensor], int]:
    """Return this rank's share with collective `late` far behind the others, which take random times themselves."""
    rank = dist.get_rank(groups[0])
    jitter = random.Random(rank if late is None else 1000 * late + rank)
    # Late on every second rank only: the others then have it under way for long.
    exchange = DelayedExchange(
        groups, lambda number: 0.04 * (number == late and rank % 2 == 0) + 0.002 * jitter.random()
    )
    share = attend_on_rank(case, case.problem(), replace(case.context(rank, exchange), num_head_groups=2))
    return [share.out, share.dq, share.dk, share.dv], exchange.started


def facts_of_delays(scheme: Scheme, groups: list[dist.ProcessGroup]) -> dict[str, Any]:
    case = Case(scheme=scheme, group_size=WORLD_SIZE, num_query_heads=4, num_key_value_heads=2, micro_batch_size=2)
    context = case.context(dist.get_rank(groups[0]), ContextGroupExchange(groups[0]))
    share = attend_on_rank(case, case.problem(), replace(context, num_head_groups=2))
    expected = [share.out, share.dq, share.dk, share.dv]
    _, started = results_with_delays(case, groups, None)
    same = {
        late: all(map(torch.equal, results_with_delays(case, groups, late)[0], expected)) for late in range(started)
    }
    return {"started": started, "same": same}


def facts_of_coalescing(group: dist.ProcessGroup) -> dict[str, Any]:
    """Run torch's own coalescing manager on gloo, which has the coalesced collectives that NCCL has."""
    rank = dist.get_rank(group)
    given = [torch.full((2, 3), 10.0 * number + rank) for number in range(4)]
    gathered = [torch.empty(2 * WORLD_SIZE, 3) for _ in given]
    scattered = [torch.empty(2, 3) for _ in given]
    works = start_all_gathers(list(zip(gathered, given, strict=True)), group, coalesce=True, async_op=True)
    for work in works:
        work.wait()
    scatters = start_reduce_scatters(list(zip(scattered, gathered, strict=True)), group, coalesce=True, async_op=True)
    for work in scatters:
        work.wait()
    return {
        "works": [len(works), len(scatters)],
        "gathered": [tensor[::2, 0].tolist() for tensor in gathered],
        "scattered": [tensor.unique().tolist() for tensor in scattered],
    }


def collect() -> dict[str, Any]:
    half, _ = dist.new_subgroups(2)
    groups = {2: half, 4: dist.group.WORLD}
    facts = {name: facts_of(case, groups[case.group_size]) for name, case in CASES.items()}
    whole = [dist.new_group() for _ in range(MOST_UNDER_WAY)]
    facts |= {f"delays {scheme}": facts_of_delays(scheme, whole) for scheme in EXCHANGING}
    facts["coalescing"] = facts_of_coalescing(whole[0])
    return facts


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return facts_of_ranks(collect, WORLD_SIZE, tmp_path_factory.mktemp("gloo"))


@pytest.mark.parametrize("name", CASES)
def test_forward_and_all_six_gradients_equal_the_dense_oracle(facts: list[dict[str, Any]], name: str) -> None:
    judged = [fact[name]["errors"] for fact in facts if fact[name]["group_rank"] == 0]
    assert len(judged) == WORLD_SIZE // CASES[name].group_size
    for errors in judged:
        assert len(errors) == 8
        assert {part: error for part, error in errors.items() if not error <= 1e-12} == {}


@pytest.mark.parametrize("name", CASES)
def test_the_wire_the_ledger_and_the_plan_agree_on_every_byte(facts: list[dict[str, Any]], name: str) -> None:
    case = CASES[name]
    for fact in (rank_facts[name] for rank_facts in facts):
        plan = case.plan(fact["group_rank"])
        # Gathered for forward and for backward, and scattered once.
        per_row = row_bytes(case.num_key_value_heads, case.head_dim, 8, case.micro_batch_size)
        expected = {
            copies.value: 2 * plan.transfer(copies).gather_bytes(per_row) + plan.transfer(copies).reduce_bytes(per_row)
            for copies in CopyKind
        }
        assert fact["ledger"] == expected
        assert fact["wire_bytes"] == sum(expected.values())
        if case.scheme is Scheme.BLOCK_PARALLEL:
            assert fact["collectives"] == []
        elif case.active is None and case.documents is None:
            assert expected["clean"] > 0
            assert (expected["corrupted"] > 0) == (case.scheme is Scheme.CONTEXT_PARALLEL)


@pytest.mark.parametrize("scheme", EXCHANGING)
def test_delaying_any_one_collective_changes_no_bit(facts: list[dict[str, Any]], scheme: Scheme) -> None:
    copies = 2 if scheme is Scheme.CONTEXT_PARALLEL else 1
    for fact in (rank_facts[f"delays {scheme}"] for rank_facts in facts):
        assert fact["started"] == 3 * 2 * copies, "three exchanges for each copy and head group"
        assert fact["same"] == {str(late): True for late in range(fact["started"])}


def test_torchs_coalescing_manager_runs_all_collectives_of_a_call_as_one_work(facts: list[dict[str, Any]]) -> None:
    for rank, fact in enumerate(rank_facts["coalescing"] for rank_facts in facts):
        assert fact["works"] == [1, 1]
        assert fact["gathered"] == [[10.0 * number + other for other in range(WORLD_SIZE)] for number in range(4)]
        assert fact["scattered"] == [[WORLD_SIZE * (10.0 * number + rank)] for number in range(4)]
