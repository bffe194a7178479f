# SPDX-License-Identifier: Apache-2.0
"""Gather of keys and values and reduce-scatter of their gradients over the context group.

Shapes: S local rows, R = 2P C rows of the gather buffer, C chunk length, B micro-batch, K key/value heads, D head dim.

The buffer has 2P chunk slots (see `attention_plan.gather_slot`): each rank's late chunk is gathered into the first
half, its early chunk into the second. Both are single collectives into a contiguous half, so no row is copied or moved
afterwards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_csbp.transformer.layout import SequenceLayout, Stream
from megatron_csbp.transformer.traffic_ledger import Collective, Direction, LayerLedger
from megatron_csbp.transformer.wait_clock import WaitClock


class Pending[T](Protocol):
    """A result that is on its way."""

    def wait(self) -> T:
        """Block until the result is there, and return it."""
        ...


@dataclass
class PendingWork[T]:
    """Asynchronous collectives and what to do once they are done."""

    works: Sequence[dist.Work]
    finish: Callable[[], T]

    def wait(self) -> T:
        """Wait for every collective, then return the result."""
        for work in self.works:
            work.wait()
        return self.finish()


@dataclass
class TimedWork[T](PendingWork[T]):
    """Asynchronous collectives, and the clock that runs while they are waited for."""

    clock: WaitClock

    def wait(self) -> T:
        """See `PendingWork.wait`."""
        self.clock.start()
        for work in self.works:
            work.wait()
        self.clock.stop()
        return self.finish()


class KeyValueExchange(Protocol):
    """What the attention asks of the network.

    Every rank of the group calls both in the same order, whatever its data. Until `wait` returns, the tensors that
    were passed in must stay as they are.
    """

    def start_gather(
        self, tensors_SBKD: Sequence[Tensor], layout: SequenceLayout, stream: Stream
    ) -> Pending[list[Tensor]]:
        """Start gathering every rank's chunks of one copy of each tensor; the results are buffers [R, B, K, D]."""
        ...

    def start_reduce_scatter(
        self, buffers_RBKD: Sequence[Tensor], layout: SequenceLayout, stream: Stream, payload_dtype: torch.dtype
    ) -> Pending[list[Tensor]]:
        """Start summing one copy's buffers [R, B, K, D] over the group.

        The results are this rank's chunks [2, C, B, K, D], the early one first. Gradients cross the link in
        `payload_dtype`; the results have the buffers' own dtype.
        """
        ...


class ContextGroupExchange:
    """The exchange over a torch.distributed process group.

    Attributes:
        ledger: where every exchange is entered, or None.
        clock: what measures the waits, or None.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Take the group; nothing is sent yet.

        Args:
            group: the context group; its rank order is the layout's.
        """
        self.ledger: LayerLedger | None = None
        self.clock: WaitClock | None = None
        self._group = group
        self._size = dist.get_world_size(group)
        self._has_reduce_scatter = dist.get_backend(group) == "nccl"

    def start_gather(
        self, tensors_SBKD: Sequence[Tensor], layout: SequenceLayout, stream: Stream
    ) -> PendingWork[list[Tensor]]:
        """See `KeyValueExchange.start_gather`."""
        works: list[dist.Work] = []
        buffers_RBKD: list[Tensor] = []
        for tensor_SBKD in tensors_SBKD:
            early_CBKD, late_CBKD = chunk_views(tensor_SBKD, layout, stream)
            buffer_RBKD = tensor_SBKD.new_empty(layout.num_chunks * layout.chunk_length, *tensor_SBKD.shape[1:])
            for half, chunk_CBKD in zip(buffer_RBKD.chunk(2), (late_CBKD, early_CBKD), strict=True):
                works.append(_start_all_gather(half, chunk_CBKD.contiguous(), self._group))
            buffers_RBKD.append(buffer_RBKD)
        if self.ledger is not None:
            self._enter(self.ledger, stream, Collective.GATHER, buffers_RBKD)
        return self._pending(works, lambda: buffers_RBKD)

    def start_reduce_scatter(
        self, buffers_RBKD: Sequence[Tensor], layout: SequenceLayout, stream: Stream, payload_dtype: torch.dtype
    ) -> PendingWork[list[Tensor]]:
        """See `KeyValueExchange.start_reduce_scatter`."""
        works: list[dist.Work] = []
        payloads_RBKD = [buffer_RBKD.to(payload_dtype) for buffer_RBKD in buffers_RBKD]
        finishes = [[self._reduce_half(half, works) for half in payload.chunk(2)] for payload in payloads_RBKD]
        if self.ledger is not None:
            self._enter(self.ledger, stream, Collective.REDUCE_SCATTER, payloads_RBKD)
        dtype = buffers_RBKD[0].dtype

        def finish() -> list[Tensor]:
            return [torch.stack([early(dtype), late(dtype)]) for late, early in finishes]

        return self._pending(works, finish)

    def _pending[T](self, works: Sequence[dist.Work], finish: Callable[[], T]) -> PendingWork[T]:
        return PendingWork(works, finish) if self.clock is None else TimedWork(works, finish, self.clock)

    def _reduce_half(self, half: Tensor, works: list[dist.Work]) -> Callable[[torch.dtype], Tensor]:
        """Start the sum of one half buffer [P C, B, K, D]; the returned call yields this rank's chunk [C, B, K, D].

        gloo's own reduce-scatter moves twice the ideal bytes, so there the chunks are exchanged and summed here, in
        rank order and in the dtype that the call asks for.
        """
        if self._has_reduce_scatter:
            chunk = half.new_empty(half.shape[0] // self._size, *half.shape[1:])
            works.append(_start_reduce_scatter(chunk, half, self._group))
            return lambda dtype: chunk.to(dtype)
        received = torch.empty_like(half)
        works.append(_started(dist.all_to_all_single(received, half, group=self._group, async_op=True)))
        by_rank = received.view(self._size, -1, *half.shape[1:])
        return lambda dtype: by_rank.sum(0, dtype=dtype)

    def _enter(self, ledger: LayerLedger, stream: Stream, collective: Collective, buffers: Sequence[Tensor]) -> None:
        """Enter an exchange of whole buffers, all ranks' shares of which are of equal size."""
        payload_bytes = sum(buffer.nbytes for buffer in buffers)
        direction = Direction.BACKWARD if runs_in_backward() else Direction.FORWARD
        remote_bytes = payload_bytes // self._size * (self._size - 1)
        ledger.add(stream, collective, direction, payload_bytes, remote_bytes)


def runs_in_backward() -> bool:
    """Return whether this call is part of a backward pass: of a gradient, or of a recomputed forward."""
    return torch._C._current_graph_task_id() != -1


def chunk_views(tensor_SBKD: Tensor, layout: SequenceLayout, stream: Stream) -> tuple[Tensor, Tensor]:
    """Return the rows of one copy's early and late chunk, each [C, B, K, D], as views."""
    early, late = (
        tensor_SBKD.narrow(0, layout.first_row(stream, chunk), layout.chunk_length) for chunk in layout.chunks
    )
    return early, late


# torch 2.14 renamed two collectives and warns about the names that are the only ones in torch 2.9 to 2.13.


def _start_all_gather(out: Tensor, given: Tensor, group: dist.ProcessGroup) -> dist.Work:
    collective = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    return _started(collective(out, given, group=group, async_op=True))


def _start_reduce_scatter(out: Tensor, given: Tensor, group: dist.ProcessGroup) -> dist.Work:
    collective = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
    return _started(collective(out, given, group=group, async_op=True))


def _started(work: dist.Work | None) -> dist.Work:
    """Return the handle of an asynchronous collective, which torch types as optional."""
    assert work is not None, "this rank is not in the context group"
    return work
