# SPDX-License-Identifier: Apache-2.0
"""The order of exchange and tiles, that every wait is in place, and what recomputation exchanges."""

import threading
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch

from megatron_csbp.transformer import communication
from megatron_csbp.transformer.attention import block_diffusion_attention
from megatron_csbp.transformer.communication import PendingWork
from megatron_csbp.transformer.geometry.scheme import Scheme
from megatron_csbp.transformer.geometry.visibility import CleanAttention
from tests.support.attention_cases import (
    Attend,
    Case,
    gradients_on_group,
    plain,
    recomputed,
    recomputed_by_hooks,
    two_layers,
)
from tests.support.copying_exchange import CopyingExchange, tell_tiles
from tests.support.dense_oracle import whole_rows
from tests.support.simulated_group import SimulatedCollectives

EXCHANGING = [Scheme.CONTEXT_PARALLEL, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL]


def runs(events: list[str]) -> list[str]:
    """Drop repetitions."""
    return [event for event, before in zip(events, ["", *events], strict=False) if event != before]


@pytest.mark.parametrize("clean_attention", CleanAttention)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("scheme", EXCHANGING)
def test_local_tiles_run_between_the_start_of_an_exchange_and_its_wait(
    scheme: Scheme, rank: int, clean_attention: CleanAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, events = Case(scheme=scheme, clean_attention=clean_attention), list[str]()
    plan = case.plan(rank)
    tell_tiles(events.append, monkeypatch)
    inputs = [t[whole_rows(plan.rows)].requires_grad_() for t in (case.problem().query, *[case.problem().key] * 2)]
    context = case.context(rank, CopyingExchange(events.append))
    out = block_diffusion_attention(inputs[0], inputs[1], inputs[2], context)
    copies = ["clean", "corrupted"] if scheme is Scheme.CONTEXT_PARALLEL else ["clean"]

    def each(event: str) -> list[str]:
        return [f"{event} {copy}" for copy in copies]

    # In the CP baseline, nobody reads the corrupted keys: they are waited for last.
    hidden_gather = [*each("start gather"), "local tile", "wait gather clean", "gathered tile"]
    hidden_gather += [f"wait gather {copy}" for copy in copies[1:]]
    assert runs(events) == hidden_gather
    assert events.count("local tile") == len(plan.local_tiles)
    events.clear()
    out.sum().backward()
    assert runs(events) == [*hidden_gather, *each("start scatter"), "local tile", *each("wait scatter")]
    assert events.count("local tile") == len(plan.local_tiles)


@pytest.mark.parametrize("layers", [plain, two_layers])
@pytest.mark.parametrize("scheme", EXCHANGING)
def test_recomputation_changes_no_bit_and_needs_three_exchanges_in_all(
    scheme: Scheme, layers: Callable[[Attend], Attend], simulated_collectives: SimulatedCollectives
) -> None:
    case = Case(scheme=scheme, group_size=4)
    expected, exchanges = gradients_on_group(case, layers)
    layer = 3 * len(case.plan(0).transfers) * (2 if layers is two_layers else 1)
    assert exchanges == [layer] * 4
    for recompute in (recomputed, recomputed_by_hooks):
        got, exchanges = gradients_on_group(case, lambda attend, r=recompute: r(layers(attend)))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        # The hooks of a non-reentrant checkpoint run the first forward's backward, which gathers once more.
        assert exchanges == [layer if recompute is recomputed else layer * 4 // 3] * 4


def test_each_layer_recomputed_on_its_own_needs_three_exchanges(simulated_collectives: SimulatedCollectives) -> None:
    case = Case(group_size=2)
    expected, _ = gradients_on_group(case, two_layers)
    got, exchanges = gradients_on_group(case, lambda attend: two_layers(recomputed(attend)))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert exchanges == [6, 6]


@pytest.mark.parametrize("reads", ["early", "late"])
@pytest.mark.parametrize("wrap", [plain, recomputed])
@pytest.mark.parametrize("scheme", EXCHANGING)
def test_it_does_not_matter_when_the_network_reads_and_delivers(
    scheme: Scheme, wrap: Callable[[Attend], Attend], reads: str, simulated_collectives: SimulatedCollectives
) -> None:
    simulated_collectives.reads = reads
    case = Case(scheme=scheme, group_size=2)
    got, _ = gradients_on_group(case, wrap)
    simulated_collectives.reads = "late" if reads == "early" else "early"
    expected, _ = gradients_on_group(case, plain)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert not any(tensor.isnan().any() for tensor in got)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("wrap", [plain, recomputed])
@pytest.mark.parametrize(
    "scheme, left_out",
    [
        *((Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL, number) for number in (0, 1, 2)),
        *((Scheme.CONTEXT_PARALLEL, number) for number in (0, 2, 4, 5)),  # 1 and 3: corrupted keys, which nobody reads
    ],
)
def test_leaving_out_any_one_wait_would_show(
    scheme: Scheme,
    left_out: int,
    wrap: Callable[[Attend], Attend],
    backend: str,
    simulated_collectives: SimulatedCollectives,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Waits are for the forward gather, for that of backward or of the recomputed forward, and for the scatter."""
    simulated_collectives.backend = backend
    waits: dict[int, count[int]] = {}

    class Impatient(PendingWork[Any]):
        def wait(self) -> Any:
            number = next(waits.setdefault(threading.get_ident(), count()))
            return self.finish() if number == left_out else super().wait()

    monkeypatch.setattr(communication, "PendingWork", Impatient)
    got, _ = gradients_on_group(Case(scheme=scheme), wrap)
    assert any(tensor.isnan().any() for tensor in got)
