# SPDX-License-Identifier: Apache-2.0
"""Exact block-diffusion attention of one rank: the tiles of a plan, merged, with the gather hidden behind the local tiles.

Shapes: S local rows, R rows of the gather buffer, B micro-batch, N query heads, K key/value heads, D head dim; G independent
problems of one tile (runs times micro-batch), T rows, U keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_csbp.transformer.attention_plan import AttentionPlan, MaskKind, RowPattern, Tile, TileKind, gather_slot
from megatron_csbp.transformer.communication import KeyValueExchange, Pending, chunk_views
from megatron_csbp.transformer.kernels.interface import AttentionKernel
from megatron_csbp.transformer.layout import Stream
from megatron_csbp.transformer.softmax_merge import accumulation_dtype, merge_partial


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
    out_SBND: Tensor = _BlockDiffusionAttention.apply(query_SBND, key_SBKD, value_SBKD, context)
    return out_SBND


class _BlockDiffusionAttention(torch.autograd.Function):
    """Saves the local tensors and the merged result; gathered keys are gathered again in backward, not kept."""

    @staticmethod
    def forward(
        ctx: Any, query_SBND: Tensor, key_SBKD: Tensor, value_SBKD: Tensor, context: AttentionContext
    ) -> Tensor:
        out_SBND, lse_SBN, gathered = attention_forward(query_SBND, key_SBKD, value_SBKD, context)
        ctx.save_for_backward(query_SBND, key_SBKD, value_SBKD, out_SBND, lse_SBN)
        ctx.attention = context
        # The forward of a recomputed layer is followed at once by its backward: keep what it gathered for that one layer.
        ctx.gathered = gathered if torch._C._current_graph_task_id() != -1 else None
        return out_SBND

    @staticmethod
    def backward(ctx: Any, grad_out_SBND: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        gathered, ctx.gathered = ctx.gathered, None
        grads = attention_backward(grad_out_SBND, *ctx.saved_tensors, ctx.attention, gathered)
        return (*grads, None)


def attention_forward(
    query_SBND: Tensor, key_SBKD: Tensor, value_SBKD: Tensor, context: AttentionContext
) -> tuple[Tensor, Tensor, list[Tensor] | None]:
    """Start the gather; run the local tiles; wait; run the gathered tiles; merge.

    Returns:
        The output [S, B, N, D] in the input dtype, its log-sum-exp [S, B, N] in the accumulation dtype, and the gathered
        clean keys and values [R, B, K, D] (None if nothing was exchanged).
    """
    plan = context.plan
    pending = _start_gather(key_SBKD, value_SBKD, context)
    dtype = accumulation_dtype(query_SBND.dtype)
    out_SBND = torch.empty(query_SBND.shape, dtype=dtype, device=query_SBND.device)
    lse_SBN = torch.empty(query_SBND.shape[:3], dtype=dtype, device=query_SBND.device)
    for tile in plan.local_tiles:
        _forward_tile(tile, query_SBND, key_SBKD, value_SBKD, out_SBND, lse_SBN, context)
    gathered = None
    if pending is not None:
        gathered = pending.wait()
        for tile in plan.gathered_tiles:
            _forward_tile(tile, query_SBND, *gathered, out_SBND, lse_SBN, context)
    return out_SBND.to(query_SBND.dtype), lse_SBN, gathered


def attention_backward(
    grad_out_SBND: Tensor,
    query_SBND: Tensor,
    key_SBKD: Tensor,
    value_SBKD: Tensor,
    out_SBND: Tensor,
    lse_SBN: Tensor,
    context: AttentionContext,
    gathered: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gather again (unless `gathered` is given) beside half of the local tiles; reduce-scatter beside the other half.

    Returns:
        Gradients of query, key and value in the input dtype, summed in the accumulation dtype.
    """
    plan = context.plan
    dtype = accumulation_dtype(query_SBND.dtype)
    pending_gather = None if gathered is not None else _start_gather(key_SBKD, value_SBKD, context)
    saved = (grad_out_SBND.contiguous(), query_SBND, out_SBND, lse_SBN)
    local = (key_SBKD, value_SBKD)
    grad_query_SBND, *local_grads = (torch.zeros_like(tensor, dtype=dtype) for tensor in (query_SBND, *local))
    beside_gather, beside_scatter = _split_local_tiles(plan)
    for tile in beside_gather:
        _backward_tile(tile, saved, local, (grad_query_SBND, *local_grads), context)
    if pending_gather is not None:
        gathered = pending_gather.wait()
    pending_scatter = None
    if gathered is not None:
        gathered_grads = [torch.zeros_like(buffer, dtype=dtype) for buffer in gathered]
        for tile in plan.gathered_tiles:
            _backward_tile(tile, saved, gathered, (grad_query_SBND, *gathered_grads), context)
        pending_scatter = _start_scatter(gathered_grads, local_grads, key_SBKD.dtype, context)
    for tile in beside_scatter:
        _backward_tile(tile, saved, local, (grad_query_SBND, *local_grads), context)
    if pending_scatter is not None:
        _add_scattered(pending_scatter, local_grads, plan)
    return (grad_query_SBND.to(query_SBND.dtype), *(grad.to(key_SBKD.dtype) for grad in local_grads))


def _split_local_tiles(plan: AttentionPlan) -> tuple[list[Tile], list[Tile]]:
    """Split the local tiles into those that run beside the gather and those beside the reduce-scatter.

    The corrupted diagonal comes before the reduce-scatter, since the CP baseline sends its key gradients there.
    """
    before, after, pairs = [], [], 0
    for tile in sorted(plan.local_tiles, key=lambda tile: tile.kind is not TileKind.CORRUPTED_DIAGONAL):
        first = tile.kind is TileKind.CORRUPTED_DIAGONAL or 2 * pairs < sum(t.num_pairs for t in plan.local_tiles)
        (before if first else after).append(tile)
        pairs += tile.num_pairs
    return before, after


def _start_gather(key_SBKD: Tensor, value_SBKD: Tensor, context: AttentionContext) -> "_PendingGather | None":
    """Start the gather of every copy that the scheme exchanges; None if it exchanges nothing."""
    if context.exchange is None:
        return None
    plan, exchange = context.plan, context.exchange
    return _PendingGather(
        [exchange.start_gather((key_SBKD, value_SBKD), plan.layout, stream) for stream in plan.exchanged_streams]
    )


@dataclass
class _PendingGather:
    """The gathers of one layer, clean copy first."""

    pendings: list[Pending[list[Tensor]]]

    def wait(self) -> list[Tensor]:
        """Wait for all of them; return the clean keys and values (corrupted ones of other ranks have no reader)."""
        return [pending.wait() for pending in self.pendings][0]


def _start_scatter(
    gathered_grads: list[Tensor], local_grads: list[Tensor], payload_dtype: torch.dtype, context: AttentionContext
) -> list[tuple[Stream, Pending[list[Tensor]]]]:
    """Start the reduce-scatter of clean gradients and, in the CP baseline, of corrupted ones."""
    plan, exchange = context.plan, context.exchange
    assert exchange is not None
    pendings = []
    for stream in plan.exchanged_streams:
        buffers = gathered_grads
        if stream is Stream.CORRUPTED:
            buffers = [_spread_own_chunks(grad, plan, buffer) for grad, buffer in zip(local_grads, gathered_grads)]
        pendings.append((stream, exchange.start_reduce_scatter(buffers, plan.layout, payload_dtype)))
    return pendings


def _spread_own_chunks(grad_SBKD: Tensor, plan: AttentionPlan, like_RBKD: Tensor) -> Tensor:
    """Move this rank's corrupted gradients into a gather buffer: the CP baseline sums them over the group."""
    buffer_RBKD = torch.zeros_like(like_RBKD)
    chunks = zip(plan.layout.chunks, chunk_views(grad_SBKD, plan.layout, Stream.CORRUPTED), strict=True)
    for chunk, grad_CBKD in chunks:
        first_row = gather_slot(plan.layout, chunk) * plan.layout.chunk_length
        buffer_RBKD.narrow(0, first_row, plan.layout.chunk_length).copy_(grad_CBKD)
        grad_CBKD.zero_()
    return buffer_RBKD


def _add_scattered(
    pendings: list[tuple[Stream, Pending[list[Tensor]]]], local_grads: list[Tensor], plan: AttentionPlan
) -> None:
    """Add the summed gradients of this rank's chunks to the local ones, in place."""
    for stream, pending in pendings:
        for grad_SBKD, scattered_2CBKD in zip(local_grads, pending.wait(), strict=True):
            for view_CBKD, chunk_CBKD in zip(
                chunk_views(grad_SBKD, plan.layout, stream), scattered_2CBKD, strict=True
            ):
                view_CBKD.add_(chunk_CBKD)


def _forward_tile(
    tile: Tile,
    query_SBND: Tensor,
    key_UBKD: Tensor,
    value_UBKD: Tensor,
    out_SBND: Tensor,
    lse_SBN: Tensor,
    context: AttentionContext,
) -> None:
    """Compute one tile and merge it into the accumulated output and log-sum-exp, in place."""
    partial_out_GTND, partial_lse_GTN = context.kernel.forward(
        _problems(query_SBND, tile.query),
        _problems(key_UBKD, tile.key),
        _problems(value_UBKD, tile.key),
        causal=tile.mask is MaskKind.CAUSAL,
        scale=context.scale,
    )
    out, lse = _run_view(out_SBND, tile.query), _run_view(lse_SBN, tile.query)
    partial_out, partial_lse = partial_out_GTND.reshape(out.shape), partial_lse_GTN.reshape(lse.shape)
    if tile.writes_first:
        out.copy_(partial_out)
        lse.copy_(partial_lse)
    else:
        merge_partial(out, lse, partial_out, partial_lse)


def _backward_tile(
    tile: Tile,
    saved: tuple[Tensor, Tensor, Tensor, Tensor],
    key_value: Sequence[Tensor],
    grads: tuple[Tensor, ...],
    context: AttentionContext,
) -> None:
    """Add one tile's share to the gradients of query, key and value, in place.

    Args:
        tile: what to compute.
        saved: gradient of the output, query and merged output [S, B, N, D], merged log-sum-exp [S, B, N].
        key_value: keys and values [U, B, K, D] of the tile's key source.
        grads: accumulated gradients of query, key and value.
        context: plan, kernel and scale.
    """
    grad_out_SBND, query_SBND, out_SBND, lse_SBN = saved
    partial_grads = context.kernel.backward(
        _problems(grad_out_SBND, tile.query),
        _problems(query_SBND, tile.query),
        *(_problems(tensor, tile.key) for tensor in key_value),
        _problems(out_SBND, tile.query),
        _problems(lse_SBN, tile.query),
        causal=tile.mask is MaskKind.CAUSAL,
        scale=context.scale,
    )
    for grad, pattern, partial in zip(grads, (tile.query, tile.key, tile.key), partial_grads, strict=True):
        view = _run_view(grad, pattern)
        view.add_(partial.reshape(view.shape))


def _run_view(tensor_SB: Tensor, pattern: RowPattern) -> Tensor:
    """Return the rows of a pattern as a view [runs..., B, T, ...] of a tensor [S, B, ...]."""
    row_stride, *rest = tensor_SB.stride()
    view = tensor_SB.as_strided(
        (*(count for count, _ in pattern.repeats), pattern.length, *tensor_SB.shape[1:]),
        (*(stride * row_stride for _, stride in pattern.repeats), row_stride, *rest),
        tensor_SB.storage_offset() + pattern.start * row_stride,
    )
    run_dims = len(pattern.repeats)
    return view.movedim(run_dims + 1, run_dims)


def _problems(tensor_SB: Tensor, pattern: RowPattern) -> Tensor:
    """Return the rows of a pattern as [G, T, ...]: a view where strides allow it (always for B = 1 or a single run)."""
    return _run_view(tensor_SB, pattern).flatten(0, len(pattern.repeats))
