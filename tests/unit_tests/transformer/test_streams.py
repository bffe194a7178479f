# SPDX-License-Identifier: Apache-2.0
"""Streams and events around the exchange: each collective and each consumer waits on the right event, no host does."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_csbp.transformer import streams
from megatron_csbp.transformer.attention import AttentionContext
from megatron_csbp.transformer.geometry.scheme import Scheme
from megatron_csbp.transformer.streams import CudaSideStream, HostSideStream, Start, Waitable, side_stream
from tests.support.attention_cases import Attend, Case, gradients_on_group, plain, recomputed, two_layers
from tests.support.fake_cuda import (
    FakeEvent,
    FakeStream,
    StreamedCollectives,
    TickingKernel,
    UncoalescedCollectives,
    use_fake_cuda,
)
from tests.support.simulated_group import SimulatedCollectives, use_simulated

EXCHANGING = [Scheme.CONTEXT_PARALLEL, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL]
CASE = Case(num_query_heads=4, num_key_value_heads=2, micro_batch_size=2)


def on_cuda(
    case: Case, wrap: Callable[[Attend], Attend], collectives: StreamedCollectives, groups: int = 1
) -> list[Tensor]:
    def adapt(context: AttentionContext) -> AttentionContext:
        return replace(context, kernel=TickingKernel(collectives.cuda), num_head_groups=groups)

    return gradients_on_group(case, wrap, adapt)[0]


@pytest.mark.parametrize("collectives", [StreamedCollectives, UncoalescedCollectives])
@pytest.mark.parametrize("reads", ["early", "late"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("wrap", [plain, recomputed, two_layers])
@pytest.mark.parametrize("scheme", EXCHANGING)
def test_results_on_streams_are_those_without_bit_for_bit(
    scheme: Scheme,
    wrap: Callable[[Attend], Attend],
    groups: int,
    reads: Any,
    collectives: type[StreamedCollectives],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = replace(CASE, scheme=scheme)
    with monkeypatch.context() as patch:
        use_simulated(SimulatedCollectives(backend="nccl"), patch)
        expected, _ = gradients_on_group(case, wrap, lambda context: replace(context, num_head_groups=groups))
    nccl = collectives(reads=reads)
    use_fake_cuda(nccl, monkeypatch)
    got = on_cuda(case, wrap, nccl, groups)
    assert not any(tensor.isnan().any() for tensor in got)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    # Keys and values in two halves each, of all copies in one call; three exchanges for a layer and a head group.
    exchanges = 2 * 3 * groups * (2 if wrap is two_layers else 1)
    collectives_of_a_call = 8 if scheme is Scheme.CONTEXT_PARALLEL else 4
    expected = [] if collectives is UncoalescedCollectives else [collectives_of_a_call] * exchanges
    assert nccl.group_calls == expected
    assert nccl.cuda.priorities == [-1, -1], "one side stream for each rank"


def forget_to_wait_for_the_side_stream(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(streams._Arrival, "wait", lambda self: None)


def run_on_the_stream_of_nccl(patch: pytest.MonkeyPatch) -> None:
    launch = CudaSideStream.launch

    def asynchronous(self: CudaSideStream, start: Start, tensors: Sequence[Tensor]) -> Sequence[Waitable]:
        return launch(self, lambda async_op: list(start(True))[:0], tensors)

    patch.setattr(CudaSideStream, "launch", asynchronous)


def forget_to_wait_for_the_computation(patch: pytest.MonkeyPatch) -> None:
    def wait_event(self: FakeStream, event: FakeEvent) -> None:
        event.stream.run_until(event.position)

    patch.setattr(FakeStream, "wait_event", wait_event)


def forget_to_keep_the_tensors(patch: pytest.MonkeyPatch) -> None:
    init = streams._Arrival.__init__
    patch.setattr(streams._Arrival, "__init__", lambda self, done, device, tensors: init(self, done, device, ()))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    "fault, symptom",
    [
        (forget_to_wait_for_the_side_stream, None),
        (run_on_the_stream_of_nccl, None),
        (forget_to_wait_for_the_computation, "does not wait for the computation"),
        (forget_to_keep_the_tensors, "handed on"),
    ],
)
def test_each_of_these_faults_would_show(
    fault: Callable[[pytest.MonkeyPatch], None], symptom: str | None, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    nccl = StreamedCollectives()
    use_fake_cuda(nccl, monkeypatch)
    fault(monkeypatch)
    if symptom is None:
        assert any(tensor.isnan().any() for tensor in on_cuda(CASE, plain, nccl, groups))
    else:
        with pytest.raises(AssertionError, match=symptom):
            on_cuda(CASE, plain, nccl, groups)


def test_tensors_are_kept_until_the_wait_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = StreamedCollectives()
    use_fake_cuda(nccl, monkeypatch)
    (arrival,) = CudaSideStream(torch.device("cpu")).launch(lambda async_op: [], [torch.empty(1)])
    assert len(arrival._tensors) == 1  # type: ignore[attr-defined]
    arrival.wait()
    assert not arrival._tensors  # type: ignore[attr-defined]


def test_a_device_has_one_side_stream_and_a_cpu_none() -> None:
    assert side_stream(torch.device("cpu")) is side_stream(torch.device("cpu"))
    assert isinstance(side_stream(torch.device("meta")), HostSideStream)
    works: list[Waitable] = []
    assert HostSideStream().launch(lambda async_op: works if async_op else [], [torch.empty(1)]) is works


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_real_device_the_computation_waits_and_the_host_does_not() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    lane = side_stream(device)
    assert lane is side_stream(device)
    source, target = torch.zeros(2**24, device=device), torch.zeros(2**24, device=device)
    torch.cuda._sleep(10**8)
    source.fill_(1)  # behind the sleep, so the copy is right only if the side stream waits for it

    def copy(async_op: bool) -> Sequence[Waitable]:
        target.copy_(source, non_blocking=True)
        return []

    (arrival,) = lane.launch(copy, [source, target])
    assert not torch.cuda.current_stream().query(), "the launch has synchronised the host"
    arrival.wait()
    assert (target + 1).unique().tolist() == [2.0]
