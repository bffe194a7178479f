# SPDX-License-Identifier: Apache-2.0
"""A GPU whose streams share one hardware queue, as `CUDA_DEVICE_MAX_CONNECTIONS=1` makes it; a model, in virtual time.

The host puts kernels and waits of all streams into one queue, in the order of its calls, and never waits itself. The
head of the queue leaves when what came before it *on its own stream* is done and, for a wait, when its event is; until
then all that is behind it stands still, whatever its stream. Recording an event costs nothing.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

TILE, COLLECTIVE = 1, 1000
"""How long each takes: a collective outlasts whatever is to hide it, so that all overlap is the order's doing."""


@dataclass(frozen=True)
class Run:
    """A kernel that ran from `start` to `end`."""

    label: str
    start: int
    end: int


@dataclass(frozen=True)
class _Command:
    """One entry of the queue: a kernel, or (without a label) a wait for the command with the number `after`."""

    stream: Hashable
    label: str = ""
    duration: int = 0
    after: int | None = None


@dataclass
class OneQueue:
    """What the host has given to one GPU."""

    _commands: list[_Command] = field(default_factory=list)

    def launch(self, stream: Hashable, label: str, duration: int) -> None:
        """Give a kernel to a stream."""
        self._commands.append(_Command(stream, label, duration))

    def record(self, stream: Hashable) -> int | None:
        """Return an event: the number of the stream's last command, or None if it has none."""
        numbers = [number for number, command in enumerate(self._commands) if command.stream is stream]
        return numbers[-1] if numbers else None

    def wait(self, stream: Hashable, event: int | None) -> None:
        """Let a stream wait for an event."""
        self._commands.append(_Command(stream, after=event))

    def runs(self) -> list[Run]:
        """Return when each kernel runs, in the order of their launches."""
        now = 0
        idle_at: dict[int, int] = {}
        ends: list[int] = []
        runs: list[Run] = []
        for command in self._commands:
            event = 0 if command.after is None else ends[command.after]
            now = max(now, idle_at.get(id(command.stream), 0), event)
            ends.append(now + command.duration)
            idle_at[id(command.stream)] = ends[-1]
            if command.label:
                runs.append(Run(command.label, now, ends[-1]))
        return runs


def unhidden(runs: list[Run]) -> list[Run]:
    """Return the collectives during which no tile starts: what was to hide them stood behind them in the queue."""
    tiles = [run for run in runs if run.label == "tile"]
    return [
        run for run in runs if run.label != "tile" and not any(run.start <= tile.start < run.end for tile in tiles)
    ]
