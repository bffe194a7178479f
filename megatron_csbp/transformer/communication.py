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

from megatron_csbp.transformer.collectives import Transfer, start_all_gathers, start_all_to_alls, start_reduce_scatters
from megatron_csbp.transformer.layout import SequenceLayout, Stream
from megatron_csbp.transformer.streams import Start, Waitable, side_stream
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

    works: Sequence[Waitable]
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
        self._uses_nccl = dist.get_backend(group) == "nccl"

    def start_gather(
        self, tensors_SBKD: Sequence[Tensor], layout: SequenceLayout, stream: Stream
    ) -> PendingWork[list[Tensor]]:
        """See `KeyValueExchange.start_gather`."""
        transfers: list[Transfer] = []
        buffers_RBKD: list[Tensor] = []
        for tensor_SBKD in tensors_SBKD:
            early_CBKD, late_CBKD = chunk_views(tensor_SBKD, layout, stream)
            buffer_RBKD = tensor_SBKD.new_empty(layout.num_chunks * layout.chunk_length, *tensor_SBKD.shape[1:])
            for half, chunk_CBKD in zip(buffer_RBKD.chunk(2), (late_CBKD, early_CBKD), strict=True):
                transfers.append((half, chunk_CBKD.contiguous()))
            buffers_RBKD.append(buffer_RBKD)
        if self.ledger is not None:
            self._enter(self.ledger, stream, Collective.GATHER, buffers_RBKD)

        def start(async_op: bool) -> Sequence[Waitable]:
            return start_all_gathers(transfers, self._group, coalesce=self._uses_nccl, async_op=async_op)

        works = self._launch(start, transfers)
        return self._pending(works, lambda: buffers_RBKD)

    def start_reduce_scatter(
        self, buffers_RBKD: Sequence[Tensor], layout: SequenceLayout, stream: Stream, payload_dtype: torch.dtype
    ) -> PendingWork[list[Tensor]]:
        """See `KeyValueExchange.start_reduce_scatter`.

        gloo's own reduce-scatter moves twice the ideal bytes, so there the chunks are exchanged and summed here, in
        rank order and in the buffers' dtype.
        """
        dtype = buffers_RBKD[0].dtype
        payloads_RBKD = [buffer_RBKD.to(payload_dtype) for buffer_RBKD in buffers_RBKD]
        if self.ledger is not None:
            self._enter(self.ledger, stream, Collective.REDUCE_SCATTER, payloads_RBKD)
        halves = [half for payload_RBKD in payloads_RBKD for half in payload_RBKD.chunk(2)]
        if self._uses_nccl:
            outs = [half.new_empty(half.shape[0] // self._size, *half.shape[1:]) for half in halves]
        else:
            outs = [torch.empty_like(half) for half in halves]
        transfers = list(zip(outs, halves, strict=True))

        def start(async_op: bool) -> Sequence[Waitable]:
            if self._uses_nccl:
                return start_reduce_scatters(transfers, self._group, coalesce=True, async_op=async_op)
            return start_all_to_alls(transfers, self._group, async_op=async_op)

        def chunk(out: Tensor) -> Tensor:
            """Return this rank's sum of one half, [C, B, K, D]."""
            return out.to(dtype) if self._uses_nccl else out.view(self._size, -1, *out.shape[1:]).sum(0, dtype=dtype)

        def finish() -> list[Tensor]:
            # The first half of a buffer holds the late chunks.
            return [
                torch.stack([chunk(early), chunk(late)]) for late, early in zip(outs[::2], outs[1::2], strict=True)
            ]

        return self._pending(self._launch(start, transfers), finish)

    def _launch(self, start: Start, transfers: Sequence[Transfer]) -> Sequence[Waitable]:
        """Start collectives beside the computation that follows."""
        tensors = [tensor for transfer in transfers for tensor in transfer]
        return side_stream(tensors[0].device).launch(start, tensors)

    def _pending[T](self, works: Sequence[Waitable], finish: Callable[[], T]) -> PendingWork[T]:
        return PendingWork(works, finish) if self.clock is None else TimedWork(works, finish, self.clock)

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
