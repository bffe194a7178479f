# SPDX-License-Identifier: Apache-2.0
"""The order of exchange and tiles, that every wait is in place, and what recomputation exchanges."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import pytest
import torch
from megatron_csbp.transformer.layout import Scheme, SequenceLayout, Stream
from torch import Tensor

from megatron_csbp.transformer import communication
from megatron_csbp.transformer.attention import block_diffusion_attention
from megatron_csbp.transformer.communication import PendingWork
from megatron_csbp.transformer.geometry.visibility import CleanAttention
from megatron_csbp.transformer.kernels.torch_kernel import TorchCpuKernel
from tests.support.attention_cases import (
    Attend,
    Case,
    gradients_on_group,
    plain,
    recomputed,
    recomputed_by_hooks,
    two_layers,
)
from tests.support.dense_oracle import whole_rows
from tests.support.simulated_group import SimulatedCollectives

EXCHANGING = [Scheme.CONTEXT_PARALLEL, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL]


@dataclass
class Diary:
    """Records tiles and exchanges in the order in which they happen, on a network of copies of this rank."""

    events: list[str] = field(default_factory=list)

    def start_gather(self, tensors: list[Tensor], layout: SequenceLayout, stream: Stream) -> PendingWork[list[Tensor]]:
        self.events.append(f"start gather {stream}")
        rows = layout.num_chunks * layout.chunk_length

        def finish() -> list[Tensor]:
            self.events.append(f"wait gather {stream}")
            return [torch.randn(rows, *tensor.shape[1:], dtype=tensor.dtype) for tensor in tensors]

        return PendingWork([], finish)

    def start_reduce_scatter(
        self, buffers: list[Tensor], layout: SequenceLayout, stream: Stream, payload_dtype: torch.dtype
    ) -> PendingWork[list[Tensor]]:
        self.events.append(f"start scatter {stream}")

        def finish() -> list[Tensor]:
            self.events.append(f"wait scatter {stream}")
            return [torch.zeros(2, layout.chunk_length, *buffer.shape[1:], dtype=buffer.dtype) for buffer in buffers]

        return PendingWork([], finish)


class DiaryKernel(TorchCpuKernel):
    """Writes each tile into the diary, as local or gathered: only prefix tiles have more rows than a chunk."""

    def __init__(self, diary: Diary, chunk_length: int) -> None:
        self._diary, self._chunk_length = diary, chunk_length

    def forward(self, query: Tensor, *rest: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        self._write(query)
        return super().forward(query, *rest, causal=causal, scale=scale)

    def backward(self, grad_out: Tensor, *rest: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        self._write(grad_out)
        return super().backward(grad_out, *rest, causal=causal, scale=scale)

    def _write(self, query_side: Tensor) -> None:
        self._diary.events.append("gathered tile" if query_side.shape[1] > self._chunk_length else "local tile")


def runs(events: list[str]) -> list[str]:
    """Drop repetitions."""
    return [event for event, before in zip(events, ["", *events], strict=False) if event != before]


@pytest.mark.parametrize("clean_attention", CleanAttention)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("scheme", EXCHANGING)
def test_local_tiles_run_between_the_start_of_an_exchange_and_its_wait(
    scheme: Scheme, rank: int, clean_attention: CleanAttention
) -> None:
    case = Case(scheme=scheme, clean_attention=clean_attention)
    diary, plan = Diary(), case.plan(rank)
    kernel = DiaryKernel(diary, plan.layout.chunk_length)
    inputs = [t[whole_rows(plan.layout)].requires_grad_() for t in (case.problem().query, *[case.problem().key] * 2)]
    out = block_diffusion_attention(inputs[0], inputs[1], inputs[2], case.context(rank, diary, kernel))
    copies = ["clean", "corrupted"] if scheme is Scheme.CONTEXT_PARALLEL else ["clean"]

    def each(event: str) -> list[str]:
        return [f"{event} {copy}" for copy in copies]

    # Prefix tiles need the clean keys only: in the CP baseline they hide the end of the corrupted ones' way.
    hidden_gather = ["start gather clean", "local tile", "wait gather clean"]
    hidden_gather += [f"start gather {copy}" for copy in copies[1:]] + ["gathered tile"]
    hidden_gather += [f"wait gather {copy}" for copy in copies[1:]]
    assert runs(diary.events) == hidden_gather
    assert diary.events.count("local tile") == len(plan.local_tiles)
    diary.events.clear()
    out.sum().backward()
    assert runs(diary.events) == [*hidden_gather, *each("start scatter"), "local tile", *each("wait scatter")]
    assert diary.events.count("local tile") == len(plan.local_tiles)


@pytest.mark.parametrize("layers", [plain, two_layers])
@pytest.mark.parametrize("scheme", EXCHANGING)
def test_recomputation_changes_no_bit_and_needs_three_exchanges_in_all(
    scheme: Scheme, layers: Callable[[Attend], Attend], simulated_collectives: SimulatedCollectives
) -> None:
    case = Case(scheme=scheme, group_size=4)
    expected, exchanges = gradients_on_group(case, layers)
    layer = 3 * len(case.plan(0).exchanged_streams) * (2 if layers is two_layers else 1)
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

    class Impatient(PendingWork[list[Tensor]]):
        def __init__(self, works: list[object], finish: Callable[[], list[Tensor]]) -> None:
            super().__init__(works, finish)

        def wait(self) -> list[Tensor]:
            number = next(waits.setdefault(threading.get_ident(), count()))
            return self.finish() if number == left_out else super().wait()

    monkeypatch.setattr(communication, "PendingWork", Impatient)
    got, _ = gradients_on_group(Case(scheme=scheme), wrap)
    assert any(tensor.isnan().any() for tensor in got)
