# SPDX-License-Identifier: Apache-2.0
"""Streams and events of a device whose work is done when a call returns."""

import math
import time
from typing import Any

from megatron_csbp.cpu_runtime.device_arguments import CPU


class Stream:
    """Stand-in for `torch.cuda.Stream`: CPU work is done when its call returns, so there is nothing to order."""

    cuda_stream = 0
    device = CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the lowest and highest stream priority; there is one."""
        return (0, 0)

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Record and return `event`, or a new one."""
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        """Wait for `event`."""

    def wait_stream(self, stream: "Stream") -> None:
        """Wait for `stream`."""

    def synchronize(self) -> None:
        """Wait for all work."""

    def query(self) -> bool:
        """Return whether all work is done."""
        return True


class Event:
    """Stand-in for `torch.cuda.Event` that records the wall clock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        self._seconds = math.nan

    def record(self, stream: Stream | None = None) -> None:
        """Record the time now."""
        del stream
        self._seconds = time.perf_counter()

    def elapsed_time(self, end_event: "Event") -> float:
        """Return the milliseconds from this event to `end_event`."""
        return (end_event._seconds - self._seconds) * 1e3

    def wait(self, stream: Stream | None = None) -> None:
        """Wait for the event."""

    def synchronize(self) -> None:
        """Wait for the event."""

    def query(self) -> bool:
        """Return whether the event has happened."""
        return True
