# SPDX-License-Identifier: Apache-2.0
"""CUDA streams and events on a CPU, as unkind as the real ones: a side stream works only when somebody waits for it.

A computing stream runs what the host gives it at once. A side stream queues it, and its queue is run up to an event
when a computing stream waits for that event. So whatever is used without its wait is still NaN. Each thread, which
stands for a rank, has its own computing stream. Nothing here can synchronise the host: a call that does is an error.

When the kernels of a rank would run on a GPU whose streams share one hardware queue, its `OneQueue` says.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_csbp.transformer import communication, streams
from megatron_csbp.transformer.kernels.torch_kernel import TorchCpuKernel
from megatron_csbp.transformer.streams import CudaSideStream
from tests.support.one_queue import COLLECTIVE, TILE, OneQueue
from tests.support.simulated_group import RankOfGroup, RenamedCollectives, use_simulated


class FakeStream:
    """A stream.

    Attributes:
        queue: work not done yet.
        ticks: kernels of the computing stream that are done for sure when this stream's next work starts.
    """

    def __init__(self, hardware: OneQueue, *, computes: bool = False) -> None:
        self.hardware = hardware
        self.queue: list[Callable[[], None]] = []
        self.ticks = 0
        self._computes = computes
        self._issued = self._done = 0

    def give(self, work: Callable[[], None]) -> None:
        if self._computes:
            work()
        else:
            self.queue.append(work)
            self._issued += 1

    def record_event(self) -> "FakeEvent":
        return FakeEvent(self, self._issued, self.ticks, self.hardware.record(self))

    def wait_event(self, event: "FakeEvent") -> None:
        self.hardware.wait(self, event.number)
        if self._computes:
            event.stream.run_until(event.position)
        else:
            assert event.position == 0, "a side stream waits for computing streams only"
            self.ticks = event.ticks

    def run_until(self, position: int) -> None:
        while self._done < position:
            self._done += 1
            self.queue.pop(0)()


@dataclass(frozen=True)
class FakeEvent:
    """A point in a stream."""

    stream: FakeStream
    position: int
    ticks: int
    number: int | None


class FakeCuda:
    """The few functions of `torch.cuda` that side streams call.

    Attributes:
        priorities: priority of each stream that was made.
        hardware: the hardware queue of each rank.
    """

    def __init__(self) -> None:
        self._local = threading.local()
        self.priorities: list[int] = []
        self.hardware: list[OneQueue] = []

    def Stream(self, device: torch.device, priority: int) -> FakeStream:
        self.priorities.append(priority)
        return FakeStream(self.computing_stream().hardware)

    def current_stream(self, device: torch.device | None = None) -> FakeStream:
        stack: list[FakeStream] = self._stack()
        return stack[-1]

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self._stack().append(stream)
        yield
        self._stack().pop()

    def computing_stream(self) -> FakeStream:
        return self._stack()[0]

    def side_stream(self, device: torch.device) -> CudaSideStream:
        """Return the side stream of this thread."""
        if not hasattr(self._local, "side"):
            self._local.side = CudaSideStream(device)
        side: CudaSideStream = self._local.side
        return side

    def _stack(self) -> list[FakeStream]:
        if not hasattr(self._local, "stack"):
            self.hardware.append(OneQueue())
            self._local.stack = [FakeStream(self.hardware[-1], computes=True)]
        stack: list[FakeStream] = self._local.stack
        return stack


class TickingKernel(TorchCpuKernel):
    """Counts the kernels on the computing stream."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def forward(self, *tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        self._tick()
        return super().forward(*tensors, **options)

    def backward(self, *tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        self._tick()
        return super().backward(*tensors, **options)

    def _tick(self) -> None:
        stream = self._cuda.computing_stream()
        stream.ticks += 1
        stream.hardware.launch(stream, "tile", TILE)


class _StreamWork:
    """Collectives of one asynchronous call, which run on a stream of NCCL's own.

    Their wait holds up the current stream, and ends the hold on their tensors.
    """

    def __init__(self, cuda: FakeCuda, parts: list["_Part"]) -> None:
        self._cuda = cuda
        self._parts = parts
        hardware = cuda.computing_stream().hardware
        hardware.wait(hardware, hardware.record(cuda.current_stream()))
        hardware.launch(hardware, "collective", COLLECTIVE)
        self._end = hardware.record(hardware)

    def wait(self) -> None:
        stream = self._cuda.current_stream()
        stream.hardware.wait(stream, self._end)
        for part in self._parts:
            stream.give(part.weakly())
        self._parts = []


@dataclass(frozen=True)
class _Part:
    """One collective and its tensors."""

    deliver: Callable[[Tensor, Tensor], None]
    out: Tensor
    given: Tensor

    def weakly(self) -> Callable[[], None]:
        """Return the delivery, which finds its tensors gone unless somebody else keeps them."""
        deliver, out, given = self.deliver, weakref.ref(self.out), weakref.ref(self.given)

        def run() -> None:
            kept = [tensor for tensor in (out(), given()) if tensor is not None]
            assert len(kept) == 2, "memory of a running collective was handed on"
            deliver(kept[0], kept[1])

        return run


@dataclass
class StreamedCollectives(RenamedCollectives):
    """NCCL on fake streams.

    Attributes:
        cuda: the streams.
        group_calls: how many collectives each group call held, over all ranks.
    """

    backend: str = "nccl"
    cuda: FakeCuda = field(default_factory=FakeCuda)
    group_calls: list[int] = field(default_factory=list)
    _local: threading.local = field(default_factory=threading.local)

    @contextmanager
    def _coalescing_manager(self, group: RankOfGroup, async_ops: bool) -> Iterator[SimpleNamespace]:
        parts = self._local.parts = []
        coalesced = SimpleNamespace(works=[])
        yield coalesced
        self._local.parts = None
        self.group_calls.append(len(parts))
        if (work := self._run(parts, async_ops)) is not None:
            coalesced.works.append(work)

    def _work(self, deliver: Callable[[Tensor, Tensor], None], out: Tensor, given: Tensor, async_op: bool) -> Any:
        current, computing = self.cuda.current_stream(), self.cuda.computing_stream()
        assert current is not computing, "a collective on the computing stream hides behind nothing"
        assert current.ticks == computing.ticks, "the collective does not wait for the computation before it"
        part = _Part(deliver, out, given)
        if getattr(self._local, "parts", None) is not None:
            self._local.parts.append(part)
            return object()
        return self._run([part], async_op)

    def _run(self, parts: list[_Part], async_op: bool) -> _StreamWork | None:
        """Run collectives as one kernel: on the current stream, or asynchronously on NCCL's own."""
        if async_op:
            return _StreamWork(self.cuda, parts)
        stream = self.cuda.current_stream()
        stream.hardware.launch(stream, "collective", COLLECTIVE)
        for part in parts:
            stream.give(part.weakly())
        return None


class UncoalescedCollectives(StreamedCollectives):
    """The same in a torch without the private manager."""

    _coalescing_manager = property()  # type: ignore[assignment]  # reading it is an AttributeError


def use_fake_cuda(collectives: StreamedCollectives, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every exchange on these collectives and their streams, as if its tensors were on CUDA."""
    use_simulated(collectives, monkeypatch)
    monkeypatch.setattr(streams, "torch", SimpleNamespace(cuda=collectives.cuda))
    monkeypatch.setattr(communication, "side_stream", collectives.cuda.side_stream)
