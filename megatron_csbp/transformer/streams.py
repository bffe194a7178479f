# SPDX-License-Identifier: Apache-2.0
"""Where collectives run: on CUDA beside the computation, on a stream of their own; on a CPU wherever gloo runs them.

Ordering on CUDA is by events, and the host never waits. The side stream waits for all that the computing stream was
given before a launch (what the collectives read is written by then, and the memory they write is no longer used), and
the computing stream waits for the launch's own event when its result is asked for. Tensors are allocated on the
computing stream and kept alive until that wait is queued, so the caching allocator can hand their memory on in stream
order and nothing needs `Tensor.record_stream`.

Collectives are launched before the computation that hides them. With `CUDA_DEVICE_MAX_CONNECTIONS=1`, where kernels
start in the order of their launches, they are then at work before that computation starts.
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


class SideStream(Protocol):
    """Runs collectives beside the computation."""

    def launch(self, start: Callable[[], Sequence[Waitable]], tensors: Sequence[Tensor]) -> Sequence[Waitable]:
        """Start collectives behind the computation so far and beside the computation that follows.

        Args:
            start: starts them asynchronously; called once, before this returns.
            tensors: all that they read and write.

        Returns:
            What the computation that needs their results has to wait for.
        """
        ...


class HostSideStream:
    """For gloo: its threads are the side stream, and a wait blocks the host until the data is there."""

    def launch(self, start: Callable[[], Sequence[Waitable]], tensors: Sequence[Tensor]) -> Sequence[Waitable]:
        """See `SideStream.launch`. A gloo work keeps its tensors alive itself."""
        return start()


class CudaSideStream:
    """For NCCL: one stream for all layers, so the collectives of a rank run in the order of their launches."""

    def __init__(self, device: torch.device) -> None:
        """Make the stream, with a high priority: a collective takes few multiprocessors, and takes them first."""
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def launch(self, start: Callable[[], Sequence[Waitable]], tensors: Sequence[Tensor]) -> Sequence[Waitable]:
        """See `SideStream.launch`."""
        self._stream.wait_event(torch.cuda.current_stream(self._device).record_event())
        with torch.cuda.stream(self._stream):
            # NCCL's works have streams of their own. Their wait holds up the current stream, the side stream.
            for work in start():
                work.wait()
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
