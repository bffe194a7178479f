# SPDX-License-Identifier: Apache-2.0
"""Clocks of exposed communication."""

import time
from dataclasses import dataclass, field
from itertools import count

import pytest
import torch

from megatron_csbp.transformer import wait_clock as module
from megatron_csbp.transformer.communication import PendingWork
from megatron_csbp.transformer.wait_clock import HostClock, StreamClock, wait_clock


@dataclass
class SlowWork:
    """A collective that takes its time."""

    seconds: float

    def wait(self) -> None:
        time.sleep(self.seconds)


def test_the_host_clock_counts_waits_and_not_what_follows_them() -> None:
    clock = HostClock()

    def finish() -> str:
        time.sleep(1.0)
        return "result"

    works = [SlowWork(0.02), SlowWork(0.03)]
    for _ in range(2):
        assert PendingWork(works, finish, clock).wait() == "result"
    assert 0.1 <= clock.take_seconds() < 1.0
    assert clock.take_seconds() == 0.0


@dataclass
class FakeEvent:
    """A CUDA event on a device whose time is a counter of milliseconds: each event is 10 ms after the one before."""

    now = count(0, 10)
    made = count()
    recorded: list[int] = field(default_factory=list)
    synchronised = False

    def record(self) -> None:
        self.recorded.append(next(FakeEvent.now))

    def synchronize(self) -> None:
        self.synchronised = True

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert end.synchronised or self.recorded[-1] < end.recorded[-1]
        return float(end.recorded[-1] - self.recorded[-1])


def test_the_stream_clock_adds_up_pairs_of_events_and_uses_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FakeEvent] = []

    def make(enable_timing: bool) -> FakeEvent:
        assert enable_timing
        made.append(FakeEvent())
        return made[-1]

    monkeypatch.setattr(module.torch.cuda, "Event", make)
    clock = StreamClock()
    assert clock.take_seconds() == 0.0
    for _ in range(2):
        for _ in range(3):
            clock.start()
            clock.stop()
        assert clock.take_seconds() == pytest.approx(0.03)
    assert len(made) == 6
    assert any(event.synchronised for event in made)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_stream_clock_measures_a_stream_that_waits_for_another() -> None:
    clock, other = StreamClock(), torch.cuda.Stream()
    with torch.cuda.stream(other):
        torch.cuda._sleep(100_000_000)
    clock.start()
    torch.cuda.current_stream().wait_stream(other)
    clock.stop()
    assert 0.01 < clock.take_seconds() < 1.0


def test_the_device_decides() -> None:
    assert isinstance(wait_clock(torch.device("cpu")), HostClock)
    assert isinstance(wait_clock(torch.device("cuda")), StreamClock)
