# SPDX-License-Identifier: Apache-2.0
"""A context group in one process: a thread for each rank, and collectives that meet at a barrier.

`SimulatedCollectives` takes the place of `torch.distributed` in the module under test; the real exchange runs on it.
It is an unkind network: until `wait`, outputs hold NaN, and with `reads="late"` inputs are read only then.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import pytest
import torch
from torch import Tensor

from megatron_csbp.transformer import collectives, communication


class SimulatedGroup:
    """A meeting point of `size` threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=60)
        self._box: list[Tensor] = [torch.empty(0)] * size

    def meet(self, rank: int, tensor: Tensor) -> list[Tensor]:
        """Return copies of what every rank brought to this meeting."""
        self._box[rank] = tensor
        self._barrier.wait()
        everything = [item.clone() for item in self._box]
        self._barrier.wait()
        return everything

    def abort(self) -> None:
        self._barrier.abort()


@dataclass(frozen=True)
class RankOfGroup:
    """Stands for the process group that one rank holds."""

    group: SimulatedGroup
    rank: int


def run_ranks[T](size: int, function: Callable[[RankOfGroup], T]) -> list[T]:
    """Run `function` once for each rank, all at the same time, and return the results by rank."""
    group = SimulatedGroup(size)
    results: dict[int, T] = {}
    errors: list[Exception] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(RankOfGroup(group, rank))
        except threading.BrokenBarrierError as error:
            errors.append(error)
        except Exception as error:
            errors.insert(0, error)
            group.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]


class _Work:
    """A collective on its way: delivers on `wait`."""

    def __init__(self, deliver: Callable[[], None]) -> None:
        self._deliver = deliver

    def wait(self) -> None:
        self._deliver()


@dataclass
class SimulatedCollectives:
    """The few functions of `torch.distributed` that the exchange calls, by the names of torch 2.9 to 2.13.

    Attributes:
        backend: what `get_backend` says; the exchange has a path for nccl and one for gloo.
        reads: whether inputs are read when a collective is started, or only when it is waited for.
        payloads: what every rank put on the wire, in order: (rank, name of the collective, input).
    """

    backend: str = "gloo"
    reads: Literal["early", "late"] = "late"
    payloads: list[tuple[int, str, Tensor]] = field(default_factory=list)

    def get_world_size(self, group: RankOfGroup) -> int:
        return group.group.size

    def get_backend(self, group: RankOfGroup) -> str:
        return self.backend

    def all_gather_into_tensor(self, out: Tensor, given: Tensor, group: RankOfGroup, async_op: bool) -> Any:
        return self._start("all_gather", out, given, group, torch.cat, async_op)

    def all_to_all_single(
        self,
        out: Tensor,
        given: Tensor,
        out_counts: list[int] | None = None,
        in_counts: list[int] | None = None,
        *,
        group: RankOfGroup,
        async_op: bool,
    ) -> Any:
        # What each rank sends to this one, from the counts that both must agree on.
        counts = torch.tensor(in_counts or [given.shape[0] // group.group.size] * group.group.size)
        expected = out_counts or [out.shape[0] // group.group.size] * group.group.size
        all_counts = group.group.meet(group.rank, counts)
        assert [int(theirs[group.rank]) for theirs in all_counts] == list(expected), "ranks disagree on what is sent"

        def shares(tensors: list[Tensor]) -> Tensor:
            parts = [t.split(c.tolist())[group.rank] for t, c in zip(tensors, all_counts, strict=True)]
            return torch.cat(parts)

        return self._start("all_to_all", out, given, group, shares, async_op)

    def reduce_scatter_tensor(self, out: Tensor, given: Tensor, group: RankOfGroup, async_op: bool) -> Any:
        def total(tensors: list[Tensor]) -> Tensor:
            return torch.stack([tensor.chunk(group.group.size)[group.rank] for tensor in tensors]).sum(0)

        return self._start("reduce_scatter", out, given, group, total, async_op)

    def _start(
        self,
        name: str,
        out: Tensor,
        given: Tensor,
        member: RankOfGroup,
        combine: Callable[[list[Tensor]], Tensor],
        async_op: bool,
    ) -> Any:
        assert all(t.is_contiguous() for t in (out, given)), "collectives take contiguous tensors"
        self.payloads.append((member.rank, name, given.detach().clone()))
        out.fill_(torch.nan)
        arrived = combine(member.group.meet(member.rank, given)) if self.reads == "early" else None

        def deliver(out: Tensor, given: Tensor) -> None:
            _fill(out, combine(member.group.meet(member.rank, given)) if arrived is None else arrived)

        return self._work(deliver, out, given, async_op)

    def _work(self, deliver: Callable[[Tensor, Tensor], None], out: Tensor, given: Tensor, async_op: bool) -> Any:
        assert async_op, "the host would wait"
        return _Work(lambda: deliver(out, given))


class RenamedCollectives(SimulatedCollectives):
    """The same by the names of torch 2.14, which warns about the old ones."""

    def all_gather_single(self, out: Tensor, given: Tensor, group: RankOfGroup, async_op: bool) -> Any:
        return super().all_gather_into_tensor(out, given, group, async_op)

    def reduce_scatter_single(self, out: Tensor, given: Tensor, group: RankOfGroup, async_op: bool) -> Any:
        return super().reduce_scatter_tensor(out, given, group, async_op)

    def all_gather_into_tensor(self, *args: object, **kwargs: object) -> NoReturn:
        raise FutureWarning("all_gather_into_tensor is deprecated")

    def reduce_scatter_tensor(self, *args: object, **kwargs: object) -> NoReturn:
        raise FutureWarning("reduce_scatter_tensor is deprecated")


def use_simulated(simulated: SimulatedCollectives, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the exchange under test call these collectives in place of torch.distributed's."""
    monkeypatch.setattr(collectives, "dist", simulated)
    monkeypatch.setattr(communication, "dist", simulated)


def _fill(out: Tensor, result: Tensor) -> None:
    assert out.shape == result.shape
    out.copy_(result)
