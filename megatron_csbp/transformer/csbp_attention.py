# SPDX-License-Identifier: Apache-2.0
"""Exact block-diffusion attention of one rank: the tiles of a plan, merged, with the exchange beside the local tiles.

Shapes: S local rows, R rows of the gather buffer, B micro-batch, N query heads, K key/value heads, D head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_csbp.transformer.annotations import annotate
from megatron_csbp.transformer.attention_plan import AttentionPlan, gather_slot
from megatron_csbp.transformer.communication import KeyValueExchange, Pending, chunk_views, runs_in_backward
from megatron_csbp.transformer.kernels.interface import AttentionKernel
from megatron_csbp.transformer.layout import Stream
from megatron_csbp.transformer.softmax_merge import accumulation_dtype
from megatron_csbp.transformer.tile_executor import KeyValue, Merged, QuerySide, TileExecutor


@dataclass(frozen=True)
class AttentionContext:
    """All that one attention layer needs besides its tensors.

    Attributes:
        plan: the rank's tiles.
        kernel: computes one tile.
        scale: factor on the scores, usually 1/sqrt(D).
        exchange: the network; None if the plan exchanges nothing.
    """

    plan: AttentionPlan
    kernel: AttentionKernel
    scale: float
    exchange: KeyValueExchange | None = None

    def __post_init__(self) -> None:
        assert self.exchange is not None or not self.plan.exchanged_streams, "this plan needs an exchange"

    @property
    def executor(self) -> TileExecutor:
        """Runs the plan's tiles."""
        return TileExecutor(self.kernel, self.scale)


def block_diffusion_attention(
    query_SBND: Tensor, key_SBKD: Tensor, value_SBKD: Tensor, context: AttentionContext
) -> Tensor:
    """Attend under the block-diffusion mask with this rank's rows of both copies.

    Args:
        query_SBND: queries in layout row order, [S, B, N, D], fp32, bf16, fp16 or fp64.
        key_SBKD: keys, [S, B, K, D], same dtype.
        value_SBKD: values, [S, B, K, D], same dtype.
        context: plan, kernel, scale and exchange.

    Returns:
        The attention output [S, B, N, D] in the input dtype.
    """
    # Tiles are strided views, so a wrong row count would read beyond the tensors.
    rows = context.plan.layout.num_rows
    assert query_SBND.shape[0] == key_SBKD.shape[0] == value_SBKD.shape[0] == rows, f"the plan has {rows} rows"
    out_SBND: Tensor = _BlockDiffusionAttention.apply(
        _dense_heads(query_SBND), _dense_heads(key_SBKD), _dense_heads(value_SBKD), context
    )
    return out_SBND


def _dense_heads(tensor_SBND: Tensor) -> Tensor:
    """Return the tensor with a contiguous last dim, which kernels take for granted; a copy only if need be."""
    return tensor_SBND if tensor_SBND.stride(-1) == 1 else tensor_SBND.contiguous()


class _BlockDiffusionAttention(torch.autograd.Function):
    """Saves the local tensors and the merged results; gathered keys are gathered again in backward, not kept."""

    @staticmethod
    def forward(
        ctx: Any, query_SBND: Tensor, key_SBKD: Tensor, value_SBKD: Tensor, context: AttentionContext
    ) -> Tensor:
        merged, gathered = attention_forward(query_SBND, KeyValue(key_SBKD, value_SBKD), context)
        ctx.save_for_backward(query_SBND, key_SBKD, value_SBKD, *merged)
        ctx.attention = context
        # A forward inside a backward pass is the recomputed one: its own backward follows at once, so what it
        # gathered is kept for this one layer. (Megatron's checkpoints and torch's reentrant ones run the backward of
        # this very call. torch's non-reentrant ones run that of the first forward, which then gathers once more.)
        ctx.gathered = gathered if runs_in_backward() else None
        return merged.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out_SBND: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query_SBND, key_SBKD, value_SBKD, out_SBND, lse_SBN = ctx.saved_tensors
        gathered, ctx.gathered = ctx.gathered, None
        queries = QuerySide(grad_out_SBND.contiguous(), query_SBND, Merged(out_SBND, lse_SBN))
        grads = attention_backward(queries, KeyValue(key_SBKD, value_SBKD), ctx.attention, gathered)
        return (*grads, None)


def attention_forward(
    query_SBND: Tensor, local: KeyValue, context: AttentionContext
) -> tuple[Merged, KeyValue | None]:
    """Start the gather; run the local tiles; wait; run the gathered tiles; merge.

    Args:
        query_SBND: queries, [S, B, N, D].
        local: this rank's keys and values, [S, B, K, D].
        context: plan, kernel, scale and exchange.

    Returns:
        The output [S, B, N, D] in the input dtype with its log-sum-exp [S, B, N] in the accumulation dtype, and the
        gathered clean keys and values [R, B, K, D] (None if nothing was exchanged).
    """
    plan, executor = context.plan, context.executor
    pending = _start_gather(local, context)
    dtype = accumulation_dtype(query_SBND.dtype)
    # Not zeroed: the diagonal tiles come first and write every row once.
    merged = Merged(
        torch.empty(query_SBND.shape, dtype=dtype, device=query_SBND.device),
        torch.empty(query_SBND.shape[:3], dtype=dtype, device=query_SBND.device),
    )
    executor.forward_local(plan, query_SBND, local, merged)
    gathered = None
    if pending is not None:
        with annotate("wait", "gather"):
            gathered = pending.wait()
        for tile in plan.gathered_tiles:
            executor.forward(tile, query_SBND, gathered, merged)
    return Merged(merged.out.to(query_SBND.dtype), merged.lse), gathered


def attention_backward(
    queries: QuerySide, local: KeyValue, context: AttentionContext, gathered: KeyValue | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gather again (unless `gathered` is given) beside half of the local tiles; reduce-scatter beside the other half.

    Args:
        queries: gradient of the output, queries and merged results, by query row.
        local: this rank's keys and values, [S, B, K, D].
        context: plan, kernel, scale and exchange.
        gathered: gathered clean keys and values [R, B, K, D], if they are at hand.

    Returns:
        Gradients of query, key and value in the input dtype, summed in the accumulation dtype.
    """
    plan, executor = context.plan, context.executor
    pending_gather = None if gathered is not None else _start_gather(local, context)
    grad_query_SBND = _zeros(queries.query)
    local_grads = KeyValue(_zeros(local.key), _zeros(local.value))
    beside_scatter = executor.backward_local(plan, queries, local, grad_query_SBND, local_grads)
    if pending_gather is not None:
        with annotate("wait", "gather"):
            gathered = pending_gather.wait()
    pending_scatter = None
    if gathered is not None:
        gathered_grads = KeyValue(_zeros(gathered.key), _zeros(gathered.value))
        for tile in plan.gathered_tiles:
            executor.backward(tile, queries, gathered, grad_query_SBND, gathered_grads)
        with annotate("start", "scatter"):
            pending_scatter = _start_scatter(gathered_grads, local_grads, local.key.dtype, context)
    for tile in beside_scatter:
        executor.backward(tile, queries, local, grad_query_SBND, local_grads)
    if pending_scatter is not None:
        with annotate("wait", "scatter"):
            pending_scatter.add_to(local_grads)
    dtype = queries.query.dtype
    return grad_query_SBND.to(dtype), local_grads.key.to(dtype), local_grads.value.to(dtype)


def _zeros(tensor: Tensor) -> Tensor:
    """Return a contiguous sum of nothing for the gradient of `tensor`, in its accumulation dtype."""
    return torch.zeros(tensor.shape, dtype=accumulation_dtype(tensor.dtype), device=tensor.device)


@dataclass(frozen=True)
class _PendingGather:
    """The gathers of one layer, clean copy first."""

    pendings: Sequence[Pending[list[Tensor]]]

    def wait(self) -> KeyValue:
        """Wait for all; return the clean keys and values (other ranks' corrupted ones have no reader)."""
        clean, *_ = [pending.wait() for pending in self.pendings]
        return KeyValue(*clean)


@dataclass(frozen=True)
class _PendingScatter:
    """The reduce-scatters of one layer."""

    plan: AttentionPlan
    pendings: Sequence[tuple[Stream, Pending[list[Tensor]]]]

    def add_to(self, local_grads: KeyValue) -> None:
        """Wait for all; add the summed gradients of this rank's chunks to the local ones, in place."""
        for stream, pending in self.pendings:
            for grad_SBKD, scattered_2CBKD in zip(local_grads, pending.wait(), strict=True):
                views = chunk_views(grad_SBKD, self.plan.layout, stream)
                for view_CBKD, chunk_CBKD in zip(views, scattered_2CBKD, strict=True):
                    view_CBKD.add_(chunk_CBKD)


def _start_gather(local: KeyValue, context: AttentionContext) -> _PendingGather | None:
    """Start the gather of every copy that the scheme exchanges; None if it exchanges nothing."""
    plan, exchange = context.plan, context.exchange
    if not plan.exchanged_streams:
        return None
    assert exchange is not None
    with annotate("start", "gather"):
        return _PendingGather([exchange.start_gather(local, plan.layout, stream) for stream in plan.exchanged_streams])


def _start_scatter(
    gathered_grads: KeyValue, local_grads: KeyValue, payload_dtype: torch.dtype, context: AttentionContext
) -> _PendingScatter:
    """Start the reduce-scatter of clean gradients and, in the CP baseline, of corrupted ones."""
    plan, exchange = context.plan, context.exchange
    assert exchange is not None
    pendings = []
    for stream in plan.exchanged_streams:
        buffers = gathered_grads
        if stream is Stream.CORRUPTED:
            buffers = KeyValue(*(_move_to_buffer(grad, plan) for grad in local_grads))
        pendings.append((stream, exchange.start_reduce_scatter(buffers, plan.layout, stream, payload_dtype)))
    return _PendingScatter(plan, pendings)


def _move_to_buffer(grad_SBKD: Tensor, plan: AttentionPlan) -> Tensor:
    """Move this rank's corrupted gradients into a gather buffer: the CP baseline sums them over the group."""
    layout = plan.layout
    buffer_RBKD = grad_SBKD.new_zeros(layout.num_chunks * layout.chunk_length, *grad_SBKD.shape[1:])
    for chunk, grad_CBKD in zip(layout.chunks, chunk_views(grad_SBKD, layout, Stream.CORRUPTED), strict=True):
        first_row = gather_slot(layout, chunk) * layout.chunk_length
        buffer_RBKD.narrow(0, first_row, layout.chunk_length).copy_(grad_CBKD)
        grad_CBKD.zero_()
    return buffer_RBKD
