# SPDX-License-Identifier: Apache-2.0
"""What one attention layer sends: gathers one head group ahead of the computation, and reduce-scatters behind it.

Shapes: S local rows, R rows of the gather buffer, C chunk length, B micro-batch, K key/value heads of one head group,
D head dim.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_csbp.transformer.annotations import annotate
from megatron_csbp.transformer.attention_plan import AttentionPlan, gather_slot
from megatron_csbp.transformer.communication import KeyValueExchange, Pending, chunk_views
from megatron_csbp.transformer.layout import Stream
from megatron_csbp.transformer.tile_executor import KeyValue


class PendingGather:
    """The gathers of one head group, clean copy first, one after the other."""

    def __init__(self, ahead: "GatherAhead", num_copies: int) -> None:
        """Take what starts and waits for gathers, and how many are this group's."""
        self._ahead = ahead
        self._num_copies = num_copies

    def wait(self) -> KeyValue:
        """Wait for the clean keys and values, and return them. The tiles that read them hide the next gather."""
        return KeyValue(*self._ahead.wait_and_start_next())

    def finish(self) -> None:
        """Wait for the rest: in the CP baseline other ranks' corrupted keys and values, which have no reader."""
        for _ in range(self._num_copies - 1):
            self._ahead.wait_and_start_next()


class GatherAhead:
    """Gathers the head groups of one layer, one ahead of the computation: at most two groups are alive.

    One gather is under way at a time: the next starts right after the wait for the one before is queued. On a GPU with
    one hardware queue a second one would be held up by the first, and with it all tiles that were to run meanwhile.
    """

    def __init__(self, groups: Iterable[KeyValue], plan: AttentionPlan, exchange: KeyValueExchange) -> None:
        """Start the first gather.

        Args:
            groups: this rank's keys and values of each head group, [S, B, K, D].
            plan: the rank's tiles.
            exchange: the network.
        """
        self._plan = plan
        self._exchange = exchange
        self._order = ((local, stream) for local in groups for stream in plan.exchanged_streams)
        self._under_way = self._start()

    def take(self) -> PendingGather:
        """Return the next group's gather. The one before must be finished and dropped."""
        return PendingGather(self, len(self._plan.exchanged_streams))

    def wait_and_start_next(self) -> list[Tensor]:
        """Queue the wait for the gather under way, start the one after it, and return what the first one brings."""
        assert self._under_way is not None, "one gather for each head group and copy"
        with annotate("wait", "gather"):
            gathered = self._under_way.wait()
        self._under_way = None
        self._under_way = self._start()
        return gathered

    def _start(self) -> Pending[list[Tensor]] | None:
        local, stream = next(self._order, (None, None))
        if local is None or stream is None:
            return None
        with annotate("start", "gather"):
            return self._exchange.start_gather(local, self._plan.layout, stream)


@dataclass(frozen=True)
class PendingScatter:
    """The reduce-scatters of one head group."""

    plan: AttentionPlan
    pendings: Sequence[tuple[Stream, Pending[list[Tensor]]]]

    def add_to(self, local_grads: KeyValue) -> None:
        """Wait for all; add the summed gradients of this rank's chunks to the local ones, in place."""
        for stream, pending in self.pendings:
            with annotate("wait", "scatter"):
                scattered = pending.wait()
            for grad_SBKD, scattered_2CBKD in zip(local_grads, scattered, strict=True):
                views = chunk_views(grad_SBKD, self.plan.layout, stream)
                for view_CBKD, chunk_CBKD in zip(views, scattered_2CBKD, strict=True):
                    view_CBKD.add_(chunk_CBKD)


def start_scatter(
    gathered_grads: KeyValue,
    local_grads: KeyValue,
    payload_dtype: torch.dtype,
    plan: AttentionPlan,
    exchange: KeyValueExchange,
) -> PendingScatter:
    """Start the reduce-scatter of clean gradients and, in the CP baseline, of corrupted ones.

    Args:
        gathered_grads: gradients of the gathered clean keys and values, [R, B, K, D].
        local_grads: gradients of the local ones, [S, B, K, D]; the corrupted rows that are sent become 0.
        payload_dtype: dtype in which gradients cross the link.
        plan: the rank's tiles.
        exchange: the network.
    """
    pendings = []
    with annotate("start", "scatter"):
        for stream in plan.exchanged_streams:
            buffers = gathered_grads
            if stream is Stream.CORRUPTED:
                buffers = KeyValue(*(_move_to_buffer(grad, plan) for grad in local_grads))
            pendings.append((stream, exchange.start_reduce_scatter(buffers, plan.layout, stream, payload_dtype)))
    return PendingScatter(plan, pendings)


def _move_to_buffer(grad_SBKD: Tensor, plan: AttentionPlan) -> Tensor:
    """Move this rank's corrupted gradients into a gather buffer: the CP baseline sums them over the group."""
    layout = plan.layout
    buffer_RBKD = grad_SBKD.new_zeros(layout.num_chunks * layout.chunk_length, *grad_SBKD.shape[1:])
    for chunk, grad_CBKD in zip(layout.chunks, chunk_views(grad_SBKD, layout, Stream.CORRUPTED), strict=True):
        first_row = gather_slot(layout, chunk) * layout.chunk_length
        buffer_RBKD.narrow(0, first_row, layout.chunk_length).copy_(grad_CBKD)
        grad_CBKD.zero_()
    return buffer_RBKD
