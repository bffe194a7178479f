# SPDX-License-Identifier: Apache-2.0
"""What one attention layer sends: gathers one head group ahead of the computation, and sums of gradients behind it.

Shapes: S local rows, R rows of the gather buffer, B micro-batch, K key/value heads of one head group, D head dim.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_csbp.transformer.annotations import annotate
from megatron_csbp.transformer.communication import KeyValueExchange, Pending
from megatron_csbp.transformer.geometry.needs import Lowering
from megatron_csbp.transformer.geometry.plan import AttentionPlan
from megatron_csbp.transformer.geometry.scheme import CopyKind
from megatron_csbp.transformer.tile_executor import KeyValue


class GatherAhead:
    """Gathers the head groups of one layer, one ahead of the computation: at most two groups are alive.

    One group's gather is under way at a time: the next starts when the wait for the one before is queued. On a GPU
    with one hardware queue a second one would be held up by the first, and with it all tiles that were to run
    meanwhile.
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
        self._groups = iter(groups)
        self._under_way: list[Pending[list[Tensor]]] = []
        self._unread: list[Pending[list[Tensor]]] = []
        self.start_next()

    def wait(self, *, start_next: bool = True) -> KeyValue:
        """Queue the wait for the clean keys and values under way, start the next group's gather, return the former."""
        assert self._under_way, "one gather for each head group"
        clean, *self._unread = self._under_way
        self._under_way = []
        with annotate("wait", "gather"):
            gathered = KeyValue(*clean.wait())
        if start_next:
            self.start_next()
        return gathered

    def start_next(self) -> None:
        """Start the next group's gather unless it is under way; in the CP baseline the corrupted copies come last."""
        if self._under_way:
            return
        local = next(self._groups, None)
        if local is None:
            return
        with annotate("start", "gather"):
            self._under_way = list(self._exchange.start_gathers(local, self._plan.transfers))

    def finish(self) -> None:
        """Wait for what nobody reads: in the CP baseline, other ranks' corrupted keys and values."""
        for pending in self._unread:
            with annotate("wait", "gather"):
                pending.wait()
        self._unread = []


@dataclass(frozen=True)
class PendingReduce:
    """Sums of one head group's key and value gradients that are under way; they are added where they belong."""

    pendings: Sequence[Pending[None]]

    def wait(self) -> None:
        """Wait for all."""
        for pending in self.pendings:
            with annotate("wait", "reduce"):
                pending.wait()


def start_reduce(
    gathered_grads: KeyValue,
    local_grads: KeyValue,
    payload_dtype: torch.dtype,
    plan: AttentionPlan,
    exchange: KeyValueExchange,
) -> PendingReduce:
    """Start summing gradients of gathered clean keys and, in the CP baseline, of corrupted ones.

    Args:
        gathered_grads: gradients of the gathered clean keys and values, [R, B, K, D].
        local_grads: gradients of the local ones, [S, B, K, D], which the sums are added to.
        payload_dtype: dtype in which gradients cross the link.
        plan: the rank's tiles.
        exchange: the network.
    """
    with annotate("start", "reduce"):
        buffers = [
            gathered_grads if copies is CopyKind.CLEAN else [_corrupted_buffer(grad, plan) for grad in local_grads]
            for copies, _ in plan.transfers
        ]
        return PendingReduce(exchange.start_reduces(buffers, local_grads, plan.transfers, payload_dtype))


def _corrupted_buffer(grad_SBKD: Tensor, plan: AttentionPlan) -> Tensor:
    """Move this rank's corrupted gradients into a gather buffer: the CP baseline sums them over the group."""
    transfer, rank = plan.corrupted, plan.rows.rank
    buffer_RBKD = grad_SBKD.new_zeros(transfer.num_rows, *grad_SBKD.shape[1:])
    if transfer.lowering is not Lowering.ALL_GATHER:
        return buffer_RBKD  # of other ranks' rows alone, which nobody here has read
    for section, (row, length) in zip(buffer_RBKD.chunk(len(transfer.parts)), transfer.parts, strict=True):
        part = grad_SBKD.narrow(0, row, length)
        section.narrow(0, rank * transfer.part_length, length).copy_(part)
        part.zero_()
    return buffer_RBKD
