# SPDX-License-Identifier: Apache-2.0
"""Collectives of several tensors at once, over the versions of torch.distributed.

Names: torch 2.14 renamed two collectives and warns about the names that are the only ones in torch 2.9 to 2.13.

Coalescing: with NCCL, the collectives of one call are one group call (`ncclGroupStart` and `ncclGroupEnd`), a single
launch in which their transfers share the links. The only way to it is `torch.distributed._coalescing_manager`, which
is private, though Megatron's own gradient buffers go through it. In a torch without it the collectives start one by
one, with the same results and in the same order on every rank.

`async_op` is what torch.distributed calls so: with it each function returns works to wait for. Without it NCCL runs on
the current stream, and nothing is returned.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

type Buffers = tuple[Tensor, Tensor]
"""What one collective writes, and what it reads."""


def start_all_gathers(
    transfers: Sequence[Buffers], group: dist.ProcessGroup, *, coalesce: bool, async_op: bool
) -> list[dist.Work]:
    """Start gathering every rank's input [n, ...] into outputs [P n, ...], in rank order."""
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    return _start(gather, transfers, group, coalesce, async_op)


def start_reduce_scatters(
    transfers: Sequence[Buffers], group: dist.ProcessGroup, *, coalesce: bool, async_op: bool
) -> list[dist.Work]:
    """Start summing inputs [P n, ...] over the ranks; rank r's output [n, ...] is the r-th share of the sum."""
    scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
    return _start(scatter, transfers, group, coalesce, async_op)


def start_all_to_alls(
    transfers: Sequence[Buffers],
    group: dist.ProcessGroup,
    *,
    async_op: bool,
    out_counts: Sequence[int] | None = None,
    in_counts: Sequence[int] | None = None,
) -> list[dist.Work]:
    """Start exchanging shares: each rank gets its share of every rank's input, in rank order.

    Args:
        transfers: outputs [rows, ...] and inputs [rows, ...].
        group: the ranks.
        async_op: see above.
        out_counts: rows from each rank; None for equal shares.
        in_counts: rows for each rank; None for equal shares.
    """

    def exchange(out: Tensor, given: Tensor, **options: Any) -> Any:
        if out_counts is None or in_counts is None:
            return dist.all_to_all_single(out, given, **options)
        return dist.all_to_all_single(out, given, list(out_counts), list(in_counts), **options)

    return _start(exchange, transfers, group, False, async_op)


def _start(
    collective: Callable[..., dist.Work | None],
    transfers: Sequence[Buffers],
    group: dist.ProcessGroup,
    coalesce: bool,
    async_op: bool,
) -> list[dist.Work]:
    if coalesce and hasattr(dist, "_coalescing_manager"):
        with dist._coalescing_manager(group, async_ops=async_op) as coalesced:
            for out, given in transfers:
                collective(out, given, group=group, async_op=async_op)
        # It is the one work of the group call, as a list; empty if that was synchronous.
        return list(coalesced.works)
    works = [collective(out, given, group=group, async_op=async_op) for out, given in transfers]
    assert not async_op or all(work is not None for work in works), "this rank is not in the context group"
    return [work for work in works if work is not None]
