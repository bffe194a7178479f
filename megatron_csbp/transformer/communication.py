# SPDX-License-Identifier: Apache-2.0
"""Gather of keys and values and reduce-scatter of their gradients over the context group.

Shapes: S local rows, R = 2P C rows of the gather buffer, C chunk length, B micro-batch, K key/value heads, D head dim.

The buffer has 2P chunk slots (see `attention_plan.gather_slot`): each rank's late chunk is gathered into the first half, its early
chunk into the second. Both are single collectives into a contiguous half, so no row is copied or moved afterwards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_csbp.transformer.layout import SequenceLayout, Stream


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


class KeyValueExchange(Protocol):
    """What the attention asks of the network. Every rank of the group calls both in the same order, whatever its data."""

    def start_gather(
        self, tensors_SBKD: Sequence[Tensor], layout: SequenceLayout, stream: Stream
    ) -> Pending[list[Tensor]]:
        """Start gathering every rank's chunks of one copy of each tensor; the results are buffers [R, B, K, D]."""
        ...

    def start_reduce_scatter(
        self, buffers_RBKD: Sequence[Tensor], layout: SequenceLayout, payload_dtype: torch.dtype
    ) -> Pending[list[Tensor]]:
        """Start summing buffers [R, B, K, D] over the group; the results are this rank's [2, C, B, K, D]: early, late chunk.

        Gradients cross the link in `payload_dtype`; the sum is taken in the buffers' own dtype.
        """
        ...


class ContextGroupExchange:
    """The exchange over a torch.distributed process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Args:
        group: the context group; its rank order is the layout's.
        """
        self._group = group
        self._size = dist.get_world_size(group)
        self._has_reduce_scatter = dist.get_backend(group) == "nccl"

    def start_gather(
        self, tensors_SBKD: Sequence[Tensor], layout: SequenceLayout, stream: Stream
    ) -> PendingWork[list[Tensor]]:
        """See `KeyValueExchange.start_gather`."""
        works, buffers_RBKD = [], []
        for tensor_SBKD in tensors_SBKD:
            early_CBKD, late_CBKD = chunk_views(tensor_SBKD, layout, stream)
            buffer_RBKD = tensor_SBKD.new_empty(layout.num_chunks * layout.chunk_length, *tensor_SBKD.shape[1:])
            for half, chunk_CBKD in zip(buffer_RBKD.chunk(2), (late_CBKD, early_CBKD), strict=True):
                works.append(
                    dist.all_gather_into_tensor(half, chunk_CBKD.contiguous(), group=self._group, async_op=True)
                )
            buffers_RBKD.append(buffer_RBKD)
        return PendingWork(works, lambda: buffers_RBKD)

    def start_reduce_scatter(
        self, buffers_RBKD: Sequence[Tensor], layout: SequenceLayout, payload_dtype: torch.dtype
    ) -> PendingWork[list[Tensor]]:
        """See `KeyValueExchange.start_reduce_scatter`."""
        works: list[dist.Work] = []
        finishes = [
            [self._reduce_half(half, payload_dtype, works) for half in buffer_RBKD.chunk(2)]
            for buffer_RBKD in buffers_RBKD
        ]

        def finish() -> list[Tensor]:
            return [torch.stack([early(), late()]) for late, early in finishes]

        return PendingWork(works, finish)

    def _reduce_half(self, half: Tensor, payload_dtype: torch.dtype, works: list[dist.Work]) -> Callable[[], Tensor]:
        """Start the sum of one half buffer [P C, B, K, D]; the returned call yields this rank's chunk [C, B, K, D].

        gloo's own reduce-scatter moves twice the ideal bytes, so there the chunks are exchanged and summed here, in rank order.
        """
        payload = half.to(payload_dtype)
        if self._has_reduce_scatter:
            chunk = payload.new_empty(half.shape[0] // self._size, *half.shape[1:])
            works.append(dist.reduce_scatter_tensor(chunk, payload, group=self._group, async_op=True))
            return lambda: chunk.to(half.dtype)
        received = torch.empty_like(payload)
        works.append(dist.all_to_all_single(received, payload, group=self._group, async_op=True))
        return lambda: received.unflatten(0, (self._size, -1)).sum(0, dtype=half.dtype)


def chunk_views(tensor_SBKD: Tensor, layout: SequenceLayout, stream: Stream) -> tuple[Tensor, Tensor]:
    """Return the rows of one copy's early and late chunk, each [C, B, K, D], as views."""
    early, late = (
        tensor_SBKD.narrow(0, layout.first_row(stream, chunk), layout.chunk_length) for chunk in layout.chunks
    )
    return early, late
