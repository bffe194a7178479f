# SPDX-License-Identifier: Apache-2.0
"""Delta-net layers over real gloo groups of 2 and 4 ranks: one spawn collects facts about all cases."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_csbp.transformer.delta_net.exchange import ContextGroupChunkExchange
from megatron_csbp.transformer.delta_net.traffic import DeltaNetSizes, layer_volumes
from megatron_csbp.transformer.geometry.scheme import BlockAssignment, Scheme
from megatron_csbp.transformer.traffic_ledger import LayerLedger, TrafficLedger, total
from tests.support.delta_oracle import HEADS, LOOK_BACK, DeltaCase, DeltaResult, add_results, run_on_rank, sequential
from tests.support.gloo_ranks import facts_of_ranks
from tests.unit_tests.transformer.test_attention_gloo import Wire

WORLD_SIZE = 4
CASES = {
    str(case): case
    for case in [
        DeltaCase(group_size=2, blocks_per_chunk=8, batch=2),
        DeltaCase(group_size=4, views=2),
        DeltaCase(group_size=4, block_size=48, blocks_per_chunk=1, slow_decay=False),
        DeltaCase(group_size=4, block_size=1, blocks_per_chunk=2),
        DeltaCase(group_size=4, document_blocks=(0, 1, 5, 9, 12, 19), assignment=BlockAssignment.CONTIGUOUS),
        DeltaCase(group_size=4, blocks_per_chunk=1, document_blocks=(0, 3), padding=1, inactive_blocks=(0, 2, 7)),
        DeltaCase(group_size=2, scheme=Scheme.BLOCK_PARALLEL),
    ]
}


def facts_of(case: DeltaCase, group: dist.ProcessGroup) -> dict[str, Any]:
    rank = dist.get_rank(group)
    problem = case.problem()
    exchange, ledger = ContextGroupChunkExchange(group), TrafficLedger()
    exchange.ledger = LayerLedger(ledger, layer=1)
    with Wire(case.group_size) as wire:
        share = run_on_rank(case, problem, rank, exchange)
    whole = []
    for tensor in (share.out, *share.grads):
        everyones = [torch.empty_like(tensor) for _ in range(case.group_size)]
        dist.all_gather(everyones, tensor, group=group)
        whole.append(everyones)
    result = add_results([DeltaResult(out, grads) for out, *grads in zip(*whole, strict=True)])
    return {
        "group_rank": rank,
        "errors": result.errors(sequential(case, problem)) if rank == 0 else None,
        "wire_bytes": wire.received_bytes,
        "ledger_bytes": total(ledger.volumes.values()).remote_bytes,
    }


def collect() -> dict[str, Any]:
    half, _ = dist.new_subgroups(2)
    groups = {2: half, 4: dist.group.WORLD}
    facts = {name: facts_of(case, groups[case.group_size]) for name, case in CASES.items()}
    return facts


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return facts_of_ranks(collect, WORLD_SIZE, tmp_path_factory.mktemp("gloo"))


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_all_gradients_equal_the_recurrence(facts: list[dict[str, Any]], name: str) -> None:
    judged = [fact[name]["errors"] for fact in facts if fact[name]["group_rank"] == 0]
    assert len(judged) == WORLD_SIZE // CASES[name].group_size
    for errors in judged:
        assert len(errors) == 6
        assert {part: error for part, error in errors.items() if not error <= 1e-11} == {}


@pytest.mark.parametrize("name", CASES)
def test_the_wire_the_ledger_and_the_closed_form_agree_on_every_byte(facts: list[dict[str, Any]], name: str) -> None:
    case = CASES[name]
    sizes = DeltaNetSizes(
        key_heads=HEADS.key_heads,
        value_heads=HEADS.value_heads,
        key_dim=HEADS.key_dim,
        value_dim=HEADS.value_dim,
        look_back=LOOK_BACK,
        row_itemsize=8,
        state_itemsize=8,
    )
    expected = layer_volumes(1, case.rows(0), sizes, case.batch, training=True, recomputed=False)
    expected_bytes = total(expected.values()).remote_bytes
    assert (expected_bytes == 0) == (case.scheme is Scheme.BLOCK_PARALLEL)
    for fact in facts:
        assert fact[name]["ledger_bytes"] == expected_bytes
        assert fact[name]["wire_bytes"] == expected_bytes
