# SPDX-License-Identifier: Apache-2.0
"""Overlap on a GPU whose streams share one hardware queue, in a model of it; and that other orders have none there."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from torch import Tensor

from megatron_csbp.transformer import streams
from megatron_csbp.transformer.attention import AttentionContext
from megatron_csbp.transformer.attention_exchange import GatherAhead
from megatron_csbp.transformer.geometry.scheme import Scheme
from megatron_csbp.transformer.streams import CudaSideStream, Start, Waitable, _Arrival
from megatron_csbp.transformer.tile_executor import KeyValue
from tests.support.attention_cases import Attend, Case, gradients_on_group, plain, recomputed, two_layers
from tests.support.fake_cuda import StreamedCollectives, TickingKernel, use_fake_cuda
from tests.support.one_queue import Run, unhidden

# So many blocks that each of 4 head groups has a local tile to hide its gradients behind.
CASE = Case(num_query_heads=8, num_key_value_heads=4, blocks_per_chunk=16)


def runs_on_each_rank(
    wrap: Callable[[Attend], Attend], groups: int, monkeypatch: pytest.MonkeyPatch, case: Case = CASE
) -> list[list[Run]]:
    """Return what each rank's GPU runs in forward and backward, with their times."""
    nccl = StreamedCollectives()
    use_fake_cuda(nccl, monkeypatch)

    def adapt(context: AttentionContext) -> AttentionContext:
        return replace(context, kernel=TickingKernel(nccl.cuda), num_head_groups=groups)

    gradients_on_group(case, wrap, adapt)
    return [queue.runs() for queue in nccl.cuda.hardware if queue.runs()]


# Under the CP baseline the rows of the corrupted copies travel in the same collectives.
@pytest.mark.parametrize("scheme", [Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL, Scheme.CONTEXT_PARALLEL])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("wrap", [plain, recomputed, two_layers])
def test_tiles_start_before_each_collective_ends(
    wrap: Callable[[Attend], Attend], groups: int, scheme: Scheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = runs_on_each_rank(wrap, groups, monkeypatch, replace(CASE, scheme=scheme))
    assert len(ranks) == 2
    for runs in ranks:
        collectives = [run for run in runs if run.label == "collective"]
        assert len(collectives) == 3 * groups * (2 if wrap is two_layers else 1)
        assert unhidden(runs) == []
        # One after the other, and the first of a layer goes before any of its tiles.
        assert all(first.end <= then.start for first, then in pairwise(collectives))
        assert runs[0] == collectives[0]
        assert runs[1].label == "tile"
        assert runs[1].start == runs[0].start


def asynchronous_collectives(patch: pytest.MonkeyPatch) -> None:
    """NCCL on its own stream, and the side stream waits for it at once."""

    def launch(self: CudaSideStream, start: Start, tensors: Sequence[Tensor]) -> Sequence[Waitable]:
        self._stream.wait_event(streams.torch.cuda.current_stream(self._device).record_event())
        with streams.torch.cuda.stream(self._stream):
            for work in start(True):
                work.wait()
            done = self._stream.record_event()
        return (_Arrival(done, self._device, tensors),)

    patch.setattr(CudaSideStream, "launch", launch)


def next_gather_before_the_wait(patch: pytest.MonkeyPatch) -> None:
    """Gather g+1 is started behind gather g, and before it is waited for."""
    init, wait = GatherAhead.__init__, GatherAhead.wait

    def start(self: GatherAhead, *arguments: Any) -> None:
        init(self, *arguments)
        self._further = self._next()  # type: ignore[attr-defined]

    def following(self: GatherAhead) -> list[Any]:
        under_way, self._under_way = self._under_way, []
        self.start_next()
        started, self._under_way = self._under_way, under_way
        return started

    def wait_for_the_first(self: GatherAhead, *, start_next: bool = True) -> KeyValue:
        gathered = wait(self, start_next=False)
        self._under_way = self._further  # type: ignore[attr-defined]
        if start_next:
            self._further = self._next()  # type: ignore[attr-defined]
        return gathered

    patch.setattr(GatherAhead, "_next", following, raising=False)
    patch.setattr(GatherAhead, "__init__", start)
    patch.setattr(GatherAhead, "wait", wait_for_the_first)


@pytest.mark.parametrize("wrap", [plain, recomputed])
@pytest.mark.parametrize(
    "order, groups",
    [(asynchronous_collectives, 1), (asynchronous_collectives, 4), (next_gather_before_the_wait, 2)],
)
def test_another_order_leaves_collectives_unhidden(
    order: Callable[[pytest.MonkeyPatch], None],
    groups: int,
    wrap: Callable[[Attend], Attend],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order(monkeypatch)
    for runs in runs_on_each_rank(wrap, groups, monkeypatch):
        assert unhidden(runs) != []
