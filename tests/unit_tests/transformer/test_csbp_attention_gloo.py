# SPDX-License-Identifier: Apache-2.0
"""Attention over real gloo groups of 2 and 4 ranks: one spawn collects facts about all cases; the tests judge them."""

import json
import os
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_csbp.transformer.attention_plan import CleanAttention
from megatron_csbp.transformer.communication import ContextGroupExchange
from megatron_csbp.transformer.layout import BlockAssignment, Scheme, Stream
from megatron_csbp.transformer.traffic_ledger import LayerLedger, TrafficLedger, total
from tests.support.attention_cases import DISTRIBUTED_SCHEMES, Case, add_results, attend_on_rank
from tests.support.dense_oracle import Result, dense_attention

WORLD_SIZE = 4
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
            self.received_bytes += args[0].nbytes * (self.group_size - 1) / self.group_size
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
        errors = result.max_errors(dense_attention(problem, case.block_size, case.clean_attention))
    return {
        "errors": errors,
        "group_rank": rank,
        "wire_bytes": wire.received_bytes,
        "collectives": wire.collectives,
        "ledger": {
            stream: total(moved for what, moved in ledger.volumes.items() if what.stream is stream).remote_bytes
            for stream in Stream
        },
    }


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD_SIZE)
    half, _ = dist.new_subgroups(2)
    groups = {2: half, 4: dist.group.WORLD}
    facts = {name: facts_of(case, groups[case.group_size]) for name, case in CASES.items()}
    dist.destroy_process_group()
    Path(folder, f"rank{rank}.json").write_text(json.dumps(facts))


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("gloo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "OMP_NUM_THREADS", "1")
        torch.multiprocessing.spawn(worker, args=(str(folder),), nprocs=WORLD_SIZE)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(WORLD_SIZE)]


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
        expected = {
            stream.value: 3
            * plan.remote_bytes(stream, case.num_key_value_heads, case.head_dim, 8, case.micro_batch_size)
            for stream in Stream
        }
        assert fact["ledger"] == expected
        assert fact["wire_bytes"] == sum(expected.values())
        if case.scheme is Scheme.BLOCK_PARALLEL:
            assert fact["collectives"] == []
        else:
            assert expected["clean"] > 0
            assert (expected["corrupted"] > 0) == (case.scheme is Scheme.CONTEXT_PARALLEL)
