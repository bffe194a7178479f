# SPDX-License-Identifier: Apache-2.0
"""Gather of keys and values and the sum of their gradients over the context group, as a plan's transfers say.

Shapes: S local rows, R rows of the gather buffer, B micro-batch, K key/value heads, D head dim.

An all-gather takes each rank's late chunk into the first half of the buffer and its early chunk into the second, each
by a single collective into a contiguous half, so no row is copied or moved afterwards (`geometry/key_map.py`). Ranges
go with one all-to-all of keys and values together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_csbp.transformer.collectives import Buffers, start_all_gathers, start_all_to_alls, start_reduce_scatters
from megatron_csbp.transformer.device_arrays import on_device
from megatron_csbp.transformer.geometry.needs import Lowering
from megatron_csbp.transformer.geometry.scheme import CopyKind
from megatron_csbp.transformer.geometry.transfers import Transfer
from megatron_csbp.transformer.streams import Waitable, side_stream
from megatron_csbp.transformer.traffic_ledger import Collective, Direction, LayerLedger
from megatron_csbp.transformer.wait_clock import WaitClock


class Pending[T](Protocol):
    """A result that is on its way."""

    def wait(self) -> T:
        """Block until the result is there, and return it."""
        ...


@dataclass
class PendingWork[T]:
    """Collectives under way, what to do once they are done, and the clock that runs while they are waited for."""

    works: Sequence[Waitable]
    finish: Callable[[], T]
    clock: WaitClock | None = None

    def wait(self) -> T:
        """Wait for every collective, then return the result."""
        if self.clock is not None:
            self.clock.start()
        for work in self.works:
            work.wait()
        if self.clock is not None:
            self.clock.stop()
        return self.finish()


type Transfers = Sequence[tuple[CopyKind, Transfer]]
"""What is exchanged together, by kind of copies."""


class KeyValueExchange(Protocol):
    """What the attention asks of the network.

    Every rank of the group calls both in the same order, whatever its data. Until `wait` returns, the tensors that
    were passed in must stay as they are.
    """

    def start_gathers(self, tensors_SBKD: Sequence[Tensor], transfers: Transfers) -> Sequence[Pending[list[Tensor]]]:
        """Start gathering rows of each tensor, for each transfer; the results are buffers [R, B, K, D]."""
        ...

    def start_reduces(
        self,
        buffers_RBKD: Sequence[Sequence[Tensor]],
        totals_SBKD: Sequence[Tensor],
        transfers: Transfers,
        payload_dtype: torch.dtype,
    ) -> Sequence[Pending[None]]:
        """Start summing the gradients of gathered rows on the ranks that hold them.

        On arrival they are added to `totals_SBKD`, in rank order and in the totals' dtype.

        Args:
            buffers_RBKD: for each transfer the gradients of its buffers.
            totals_SBKD: what the sums are added to.
            transfers: those that gathered the rows.
            payload_dtype: dtype in which gradients cross the link.
        """
        ...


@dataclass
class _Job[T]:
    """Collectives of one transfer.

    Attributes:
        buffers: what each writes and reads.
        start: starts them all; takes buffers, so that equal jobs can be started as one.
        finish: makes the result of what they wrote.
    """

    buffers: list[Buffers]
    start: Callable[[Sequence[Buffers], bool], Sequence[Waitable]]
    finish: Callable[[], T]


class ContextGroupExchange:
    """The exchange over a torch.distributed process group.

    Attributes:
        ledger: where every exchange is entered, or None.
        clock: what measures the waits, or None.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Take the group; nothing is sent yet.

        Args:
            group: the context group; its rank order is the plan's.
        """
        self.ledger: LayerLedger | None = None
        self.clock: WaitClock | None = None
        self._group = group
        self._uses_nccl = dist.get_backend(group) == "nccl"

    def start_gathers(
        self, tensors_SBKD: Sequence[Tensor], transfers: Transfers
    ) -> Sequence[PendingWork[list[Tensor]]]:
        """See `KeyValueExchange.start_gathers`."""
        jobs = []
        for copies, transfer in transfers:
            self._enter(transfer, copies, Collective.GATHER, tensors_SBKD, tensors_SBKD[0].dtype)
            gathers_all = transfer.lowering is Lowering.ALL_GATHER
            jobs.append((self._all_gather if gathers_all else self._gather_ranges)(tensors_SBKD, transfer))
        return self._launch(jobs)

    def start_reduces(
        self,
        buffers_RBKD: Sequence[Sequence[Tensor]],
        totals_SBKD: Sequence[Tensor],
        transfers: Transfers,
        payload_dtype: torch.dtype,
    ) -> Sequence[PendingWork[None]]:
        """See `KeyValueExchange.start_reduces`."""
        jobs = []
        for (copies, transfer), buffers in zip(transfers, buffers_RBKD, strict=True):
            self._enter(transfer, copies, Collective.REDUCE_SCATTER, buffers, payload_dtype)
            payloads = [buffer_RBKD.to(payload_dtype) for buffer_RBKD in buffers]
            gathers_all = transfer.lowering is Lowering.ALL_GATHER
            jobs.append(
                (self._reduce_scatter if gathers_all else self._return_ranges)(payloads, totals_SBKD, transfer)
            )
        return self._launch(jobs)

    def _all_gather(self, tensors_SBKD: Sequence[Tensor], transfer: Transfer) -> _Job[list[Tensor]]:
        buffers_RBKD = [tensor.new_empty(transfer.num_rows, *tensor.shape[1:]) for tensor in tensors_SBKD]
        transfers: list[Buffers] = []
        for tensor_SBKD, buffer_RBKD in zip(tensors_SBKD, buffers_RBKD, strict=True):
            for section, (row, length) in zip(buffer_RBKD.chunk(len(transfer.parts)), transfer.parts, strict=True):
                part = _padded(tensor_SBKD.narrow(0, row, length), transfer.part_length)
                transfers.append((section, part))

        return _Job(transfers, self._start_all_gathers, lambda: buffers_RBKD)

    def _reduce_scatter(
        self, payloads_RBKD: Sequence[Tensor], totals_SBKD: Sequence[Tensor], transfer: Transfer
    ) -> _Job[None]:
        """Sum the shares of all ranks.

        gloo's own reduce-scatter moves twice the ideal bytes, so there the shares are exchanged and summed here.
        """
        size, sections = transfer.group_size, len(transfer.parts)
        given = [section for payload in payloads_RBKD for section in payload.chunk(sections)]
        if self._uses_nccl:
            outs = [section.new_empty(section.shape[0] // size, *section.shape[1:]) for section in given]
        else:
            outs = [torch.empty_like(section) for section in given]

        def finish() -> None:
            places = [total.narrow(0, row, length) for total in totals_SBKD for row, length in transfer.parts]
            for place, out in zip(places, outs, strict=True):
                length = place.shape[0]
                if self._uses_nccl:
                    place.add_(out[:length])
                else:
                    place.add_(out.view(size, -1, *out.shape[1:])[:, :length].sum(0, dtype=place.dtype))

        return _Job(list(zip(outs, given, strict=True)), self._start_reduce_scatters, finish)

    def _gather_ranges(self, tensors_SBKD: Sequence[Tensor], transfer: Transfer) -> _Job[list[Tensor]]:
        assert transfer.send_rows is not None
        rows = on_device(transfer.send_rows, tensors_SBKD[0].device)
        given = torch.cat([tensor.index_select(0, rows) for tensor in tensors_SBKD], dim=2)
        out = given.new_empty(transfer.num_rows, *given.shape[1:])

        def finish() -> list[Tensor]:
            arrived = out
            if transfer.arrival is not None:
                arrived = out.index_select(0, on_device(transfer.arrival, out.device))
            return list(torch.split(arrived, [tensor.shape[2] for tensor in tensors_SBKD], dim=2))

        return self._all_to_all(out, given, transfer.receive_counts, transfer.send_counts, finish)

    def _return_ranges(
        self, payloads_RBKD: Sequence[Tensor], totals_SBKD: Sequence[Tensor], transfer: Transfer
    ) -> _Job[None]:
        assert transfer.send_rows is not None
        send_rows = transfer.send_rows
        joint = torch.cat(list(payloads_RBKD), dim=2)
        given = joint
        if transfer.arrival is not None:
            given = torch.empty_like(joint).index_copy_(0, on_device(transfer.arrival, joint.device), joint)
        out = given.new_empty(transfer.sent_rows, *given.shape[1:])

        def finish() -> None:
            rows = on_device(send_rows, out.device)
            shares = torch.split(out, [payload.shape[2] for payload in payloads_RBKD], dim=2)
            counts = list(transfer.send_counts)
            # Rank by rank: two ranks may return gradients of the same row, one never returns it twice.
            for total_SBKD, share in zip(totals_SBKD, shares, strict=True):
                for some_rows, part in zip(torch.split(rows, counts), torch.split(share, counts), strict=True):
                    if some_rows.shape[0]:
                        total_SBKD.index_add_(0, some_rows, part.to(total_SBKD.dtype))

        return self._all_to_all(out, given, transfer.send_counts, transfer.receive_counts, finish)

    def _all_to_all[T](
        self,
        out: Tensor,
        given: Tensor,
        out_counts: Sequence[int],
        in_counts: Sequence[int],
        finish: Callable[[], T],
    ) -> _Job[T]:
        def start(buffers: Sequence[Buffers], async_op: bool) -> Sequence[Waitable]:
            return start_all_to_alls(
                buffers, self._group, async_op=async_op, out_counts=out_counts, in_counts=in_counts
            )

        return _Job([(out, given.contiguous())], start, finish)

    def _start_all_gathers(self, buffers: Sequence[Buffers], async_op: bool) -> Sequence[Waitable]:
        return start_all_gathers(buffers, self._group, coalesce=self._uses_nccl, async_op=async_op)

    def _start_reduce_scatters(self, buffers: Sequence[Buffers], async_op: bool) -> Sequence[Waitable]:
        if self._uses_nccl:
            return start_reduce_scatters(buffers, self._group, coalesce=True, async_op=async_op)
        return start_all_to_alls(buffers, self._group, async_op=async_op)

    def _launch[T](self, jobs: Sequence[_Job[T]]) -> Sequence[PendingWork[T]]:
        """Start all jobs beside the computation that follows: collectives of one kind in one call."""
        buffers = [pair for job in jobs for pair in job.buffers]

        def start(async_op: bool) -> Sequence[Waitable]:
            if len({job.start for job in jobs}) == 1:
                return jobs[0].start(buffers, async_op)
            return [work for job in jobs for work in job.start(job.buffers, async_op)]

        tensors = [tensor for pair in buffers for tensor in pair]
        works = side_stream(tensors[0].device).launch(start, tensors)
        pendings, taken = [], 0
        for job in jobs:
            # gloo has a work for each collective; a side stream's launch arrives as a whole.
            own = works[taken : taken + len(job.buffers)] if len(works) == len(buffers) else works
            pendings.append(PendingWork(own, job.finish, self.clock))
            taken += len(job.buffers)
        return pendings

    def _enter(
        self,
        transfer: Transfer,
        copies: CopyKind,
        collective: Collective,
        tensors: Sequence[Tensor],
        dtype: torch.dtype,
    ) -> None:
        """Enter an exchange in the ledger."""
        if self.ledger is None:
            return
        per_row = sum(tensor.shape[1:].numel() for tensor in tensors) * dtype.itemsize
        gathers = collective is Collective.GATHER
        remote = transfer.gather_bytes(per_row) if gathers else transfer.reduce_bytes(per_row)
        # In an all-gather the buffers hold this rank's own share too.
        payload = transfer.buffer_bytes(per_row) if transfer.lowering is Lowering.ALL_GATHER else remote
        direction = Direction.BACKWARD if runs_in_backward() else Direction.FORWARD
        self.ledger.add(copies, collective, direction, payload, remote)


def _padded(part: Tensor, length: int) -> Tensor:
    """Return rows as one contiguous tensor of `length` rows; what is added is never read."""
    if part.shape[0] == length:
        return part.contiguous()
    padded = part.new_zeros(length, *part.shape[1:])
    padded[: part.shape[0]] = part
    return padded


def runs_in_backward() -> bool:
    """Return whether this call is part of a backward pass: of a gradient, or of a recomputed forward."""
    return torch._C._current_graph_task_id() != -1
