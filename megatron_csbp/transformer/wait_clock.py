# SPDX-License-Identifier: Apache-2.0
"""Time that computation stands still for a collective: exposed communication."""

import time
from typing import Protocol

import torch


class WaitClock(Protocol):
    """Measures waits, one at a time."""

    def start(self) -> None:
        """Note that a wait begins."""
        ...

    def stop(self) -> None:
        """Note that it is over."""
        ...

    def take_seconds(self) -> float:
        """Return the seconds waited since the last call, and start anew."""
        ...


class HostClock:
    """For collectives whose wait blocks the host, as gloo's do."""

    def __init__(self) -> None:
        self._started = 0.0
        self._seconds = 0.0

    def start(self) -> None:
        """See `WaitClock.start`."""
        self._started = time.perf_counter()

    def stop(self) -> None:
        """See `WaitClock.stop`."""
        self._seconds += time.perf_counter() - self._started

    def take_seconds(self) -> float:
        """See `WaitClock.take_seconds`."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class StreamClock:
    """For collectives whose wait blocks the current CUDA stream and not the host, as NCCL's do.

    An event before and one after the wait enclose just the time that the stream stands still. Nothing is synchronised
    until the time is taken.
    """

    def __init__(self) -> None:
        self._used: list[torch.cuda.Event] = []
        self._free: list[torch.cuda.Event] = []

    def start(self) -> None:
        """See `WaitClock.start`."""
        self._record()

    def stop(self) -> None:
        """See `WaitClock.stop`."""
        self._record()

    def take_seconds(self) -> float:
        """See `WaitClock.take_seconds`; waits for the last event."""
        if not self._used:
            return 0.0
        self._used[-1].synchronize()
        pairs = zip(self._used[::2], self._used[1::2], strict=True)
        milliseconds: float = sum(before.elapsed_time(after) for before, after in pairs)
        self._free.extend(self._used)
        self._used.clear()
        return milliseconds / 1000.0

    def _record(self) -> None:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._used.append(event)


def wait_clock(device: torch.device) -> WaitClock:
    """Return the clock for tensors on `device`."""
    return StreamClock() if device.type == "cuda" else HostClock()
