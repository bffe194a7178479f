# SPDX-License-Identifier: Apache-2.0
"""Where collectives run: on CUDA beside the computation, on a stream of their own; on a CPU wherever gloo runs them.

Ordering on CUDA is by events, and the host never waits. The side stream waits for all that the computing stream was
given before a launch (what the collectives read is written by then, and the memory they write is no longer used), and
the computing stream waits for the launch's own event when its result is asked for. Tensors are allocated on the
computing stream and kept alive until that wait is queued, so the caching allocator can hand their memory on in stream
order and nothing needs `Tensor.record_stream`.

With `CUDA_DEVICE_MAX_CONNECTIONS=1`, which Megatron demands below compute capability 10, all streams share one
hardware queue: what is at its head holds up all that the host gave later, on any stream. Three rules let collectives
overlap even so (`tests/support/one_queue.py` is this queue):

* A collective is started synchronously (`async_op=False`) with the side stream as the current one. NCCL then runs on
  it, with its priority. A work's `wait`, which an asynchronous start needs on top, would be a command behind the
  collective and in front of the computation that shall hide it.
* After the collective there is nothing on the side stream but an event. Who needs the result waits on the computing
  stream, behind the computation that hides it.
* A collective is started when the wait for the one before it is queued already (`GatherAhead`): the second of two in
  a row would be held up by the first, and the computation behind it too.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor


class Waitable(Protocol):
    """Something under way, such as a `torch.distributed.Work`."""

    def wait(self) -> Any:
        """Let the computation that follows come after it."""
        ...


type Start = Callable[[bool], Sequence[Waitable]]
"""Starts collectives; takes their `async_op` and returns their works, none if they were started synchronously."""


class SideStream(Protocol):
    """Runs collectives beside the computation."""

    def launch(self, start: Start, tensors: Sequence[Tensor]) -> Sequence[Waitable]:
        """Start collectives behind the computation so far and beside the computation that follows.

        Args:
            start: starts them; called once, before this returns.
            tensors: all that they read and write.

        Returns:
            What the computation that needs their results has to wait for.
        """
        ...


class HostSideStream:
    """For gloo: its threads are the side stream, and a wait blocks the host until the data is there."""

    def launch(self, start: Start, tensors: Sequence[Tensor]) -> Sequence[Waitable]:
        """See `SideStream.launch`. A gloo work keeps its tensors alive itself."""
        return start(True)


class CudaSideStream:
    """For NCCL: one stream for all layers, so the collectives of a rank run in the order of their launches."""

    def __init__(self, device: torch.device) -> None:
        """Make the stream, with a high priority: a collective takes few multiprocessors, and takes them first."""
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def launch(self, start: Start, tensors: Sequence[Tensor]) -> Sequence[Waitable]:
        """See `SideStream.launch`."""
        self._stream.wait_event(torch.cuda.current_stream(self._device).record_event())
        with torch.cuda.stream(self._stream):
            works = start(False)
            assert not works, "a collective that was started synchronously has no work"
            done = self._stream.record_event()
        return (_Arrival(done, self._device, tensors),)


class _Arrival:
    """The end of one launch on the side stream."""

    def __init__(self, done: torch.cuda.Event, device: torch.device, tensors: Sequence[Tensor]) -> None:
        self._done = done
        self._device = device
        self._tensors = tensors  # only to keep them alive

    def wait(self) -> None:
        """Hold up the computing stream, not the host."""
        torch.cuda.current_stream(self._device).wait_event(self._done)
        self._tensors = ()


@cache
def side_stream(device: torch.device) -> SideStream:
    """Return the side stream of a device, the same one at every call."""
    return CudaSideStream(device) if device.type == "cuda" else HostSideStream()
