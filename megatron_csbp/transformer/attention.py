# SPDX-License-Identifier: Apache-2.0
"""Exact block-diffusion attention of one rank: the tiles of a plan, merged, with the exchange beside the tiles.

Local tiles run once for all heads. The tiles that need gathered keys run head group by head group: while those of one
group run, the keys of the next are on their way here.

Shapes: S local rows, R rows of the gather buffer, B micro-batch, N query heads, K key/value heads, D head dim. Heads
are those of one group where a tensor belongs to one.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_csbp.transformer.attention_exchange import GatherAhead, PendingReduce, start_reduce
from megatron_csbp.transformer.communication import KeyValueExchange, runs_in_backward
from megatron_csbp.transformer.geometry.plan import AttentionPlan
from megatron_csbp.transformer.geometry.tiles import Tile
from megatron_csbp.transformer.head_groups import HeadGroup, head_groups
from megatron_csbp.transformer.kernels.interface import AttentionKernel
from megatron_csbp.transformer.softmax_merge import accumulation_dtype
from megatron_csbp.transformer.tile_executor import Gradients, KeyValue, Merged, QuerySide, TileExecutor


@dataclass(frozen=True)
class AttentionContext:
    """All that one attention layer needs besides its tensors.

    Attributes:
        plan: the rank's tiles.
        kernel: computes one tile.
        scale: factor on the scores, usually 1/sqrt(D).
        exchange: the network; None if the plan exchanges nothing.
        num_head_groups: G, groups of heads that are exchanged one after the other; divides K.
        grad_payload_dtype: dtype in which key and value gradients cross a link; None: dtype of the keys.
    """

    plan: AttentionPlan
    kernel: AttentionKernel
    scale: float
    exchange: KeyValueExchange | None = None
    num_head_groups: int = 1
    grad_payload_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        assert self.exchange is not None or not self.plan.exchanges, "this plan needs an exchange"

    @property
    def executor(self) -> TileExecutor:
        """Runs the plan's tiles."""
        return TileExecutor(self.kernel, self.scale)

    def head_groups(self, query_SBND: Tensor, key_SBKD: Tensor) -> Sequence[HeadGroup]:
        """Return the groups of heads that are exchanged; none if the plan exchanges nothing."""
        if not self.plan.exchanges:
            return ()
        return head_groups(query_SBND.shape[2], key_SBKD.shape[2], self.num_head_groups)

    def gather_ahead(self, local: KeyValue, groups: Sequence[HeadGroup]) -> GatherAhead | None:
        """Start gathering the groups' keys and values, one after the other; None if there are no groups."""
        if not groups:
            return None
        assert self.exchange is not None
        return GatherAhead((local.heads(group.keys) for group in groups), self.plan, self.exchange)

    def start_reduce(self, gathered_grads: KeyValue, local_grads: KeyValue, dtype: torch.dtype) -> PendingReduce:
        """Start summing the gradients of gathered keys where they belong; `dtype` is that of the keys."""
        assert self.exchange is not None
        payload_dtype = self.grad_payload_dtype or dtype
        return start_reduce(gathered_grads, local_grads, payload_dtype, self.plan, self.exchange)


def block_diffusion_attention(
    query_SBND: Tensor, key_SBKD: Tensor, value_SBKD: Tensor, context: AttentionContext
) -> Tensor:
    """Attend under the block-diffusion mask with this rank's rows of all copies.

    Args:
        query_SBND: queries in the plan's row order, [S, B, N, D], fp32, bf16, fp16 or fp64.
        key_SBKD: keys, [S, B, K, D], same dtype.
        value_SBKD: values, [S, B, K, D], same dtype.
        context: plan, kernel, scale and exchange.

    Returns:
        The attention output [S, B, N, D] in the input dtype; 0 in rows that see nothing.
    """
    # Tiles are strided views, so a wrong row count would read beyond the tensors.
    rows = context.plan.rows.num_rows
    assert query_SBND.shape[0] == key_SBKD.shape[0] == value_SBKD.shape[0] == rows, f"the plan has {rows} rows"
    tensors = (_dense_heads(query_SBND), _dense_heads(key_SBKD), _own_memory(_dense_heads(value_SBKD)))
    out_SBND: Tensor = _BlockDiffusionAttention.apply(*tensors, context)
    return out_SBND


def _dense_heads(tensor_SBND: Tensor) -> Tensor:
    """Return the tensor with a contiguous last dim, which kernels take for granted; a copy only if need be."""
    return tensor_SBND if tensor_SBND.stride(-1) == 1 else tensor_SBND.contiguous()


def _own_memory(value_SBKD: Tensor) -> Tensor:
    """Return the values in memory of their own where they are a small part of the tensor that they are a view of.

    They are saved for backward, and a view would save the whole fused projection with them: with 32 query and 8 key
    heads six times as much. Queries and keys are copies already, made by the position embedding.
    """
    is_small_part = value_SBKD.untyped_storage().nbytes() > 2 * value_SBKD.nbytes
    return value_SBKD.contiguous() if is_small_part else value_SBKD


class _BlockDiffusionAttention(torch.autograd.Function):
    """Saves the local tensors and the merged results; gathered keys are gathered again in backward, not kept."""

    @staticmethod
    def forward(
        ctx: Any, query_SBND: Tensor, key_SBKD: Tensor, value_SBKD: Tensor, context: AttentionContext
    ) -> Tensor:
        # A forward inside a backward pass is the recomputed one: its own backward follows at once, so what it
        # gathered is kept for this one layer. (Megatron's checkpoints and torch's reentrant ones run the backward of
        # this very call. torch's non-reentrant ones run that of the first forward, which then gathers once more.)
        kept: deque[KeyValue] | None = deque() if runs_in_backward() else None
        merged = attention_forward(query_SBND, KeyValue(key_SBKD, value_SBKD), context, kept)
        ctx.save_for_backward(query_SBND, key_SBKD, value_SBKD, *merged)
        ctx.attention = context
        ctx.gathered = kept or None
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
    query_SBND: Tensor, local: KeyValue, context: AttentionContext, kept: deque[KeyValue] | None = None
) -> Merged:
    """Start the first gather; run the local tiles; then, group by group, wait, start the next gather, run the tiles.

    Args:
        query_SBND: queries, [S, B, N, D].
        local: this rank's keys and values, [S, B, K, D].
        context: plan, kernel, scale and exchange.
        kept: takes each group's gathered clean keys and values [R, B, K, D]; by default they are dropped.

    Returns:
        The output [S, B, N, D] in the input dtype with its log-sum-exp [S, B, N] in the accumulation dtype.
    """
    plan, executor = context.plan, context.executor
    groups = context.head_groups(query_SBND, local.key)
    gathers = context.gather_ahead(local, groups)
    dtype = accumulation_dtype(query_SBND.dtype)
    # Not zeroed: every row is written by its first tile, or is among the plan's unwritten rows.
    merged = Merged(
        torch.empty(query_SBND.shape, dtype=dtype, device=query_SBND.device),
        torch.empty(query_SBND.shape[:3], dtype=dtype, device=query_SBND.device),
    )
    final_SBND = None if dtype == query_SBND.dtype else torch.empty_like(merged.out, dtype=query_SBND.dtype)
    executor.forward_local(plan, query_SBND, local, merged)
    for heads in groups:
        assert gathers is not None
        gathered = gathers.wait()
        group_final = None if final_SBND is None else final_SBND[:, :, heads.queries]
        for tile in plan.gathered_tiles:
            executor.forward(tile, query_SBND[:, :, heads.queries], gathered, merged.heads(heads.queries), group_final)
        gathers.finish()
        if kept is not None:
            kept.append(gathered)
        del gathered  # before the gather after the next starts: two groups' keys at most
    if final_SBND is None:
        return merged
    for start, stop in plan.unfinished:
        final_SBND[start:stop] = merged.out[start:stop]
    return Merged(final_SBND, merged.lse)


def attention_backward(
    queries: QuerySide, local: KeyValue, context: AttentionContext, gathered: deque[KeyValue] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gathers run beside tiles with gathered keys, and sums of gradients beside local tiles: one thing at a time.

    Args:
        queries: gradient of the output, queries and merged results, by query row.
        local: this rank's keys and values, [S, B, K, D].
        context: plan, kernel, scale and exchange.
        gathered: each group's gathered clean keys and values [R, B, K, D], if they are at hand; emptied on the way.

    Returns:
        Gradients of query, key and value in the input dtype, summed in the accumulation dtype.
    """
    plan, executor = context.plan, context.executor
    groups = context.head_groups(queries.query, local.key)
    gathers = None if gathered is not None else context.gather_ahead(local, groups)
    grads = Gradients(_zeros(queries.query), KeyValue(_zeros(local.key), _zeros(local.value)))
    beside_reduces = _shares(executor.backward_local(plan, queries, local, grads), max(1, len(groups)))
    keys = _next_keys(gathers, gathered) if groups else None
    for number, heads in enumerate(groups):
        assert keys is not None
        sent = _send_side(executor, plan, queries.heads(heads.queries), keys, grads.query[:, :, heads.queries])
        if gathers is not None:
            gathers.finish()
        # The wait for the next gather comes before the sum starts: one collective under way at a time. And the keys
        # of this group go before the gather after the next starts: two groups' keys at most are alive.
        keys = _next_keys(gathers, gathered, start=False) if number + 1 < len(groups) else None
        pending = context.start_reduce(sent, grads.keys.heads(heads.keys), local.key.dtype)
        for tile in beside_reduces[number]:
            executor.backward(tile, queries, local, grads)
        pending.wait()
        del sent, pending  # before the next group allocates its own
        if gathers is not None:
            gathers.start_next()
    if not groups:
        for tile in beside_reduces[0]:
            executor.backward(tile, queries, local, grads)
    dtype = local.key.dtype
    return grads.query.to(dtype), grads.keys.key.to(dtype), grads.keys.value.to(dtype)


def _send_side(
    executor: TileExecutor, plan: AttentionPlan, queries: QuerySide, keys: KeyValue, grad_query_SBND: Tensor
) -> KeyValue:
    """Run one head group's tiles with gathered keys, and return those keys' gradients [R, B, K, D]."""
    grads = Gradients(grad_query_SBND, KeyValue(_zeros(keys.key), _zeros(keys.value)))
    for tile in plan.gathered_tiles:
        executor.backward(tile, queries, keys, grads)
    return grads.keys


def _next_keys(gathers: GatherAhead | None, gathered: deque[KeyValue] | None, *, start: bool = True) -> KeyValue:
    """Return the next group's gathered keys and values, from the network or from the recomputed forward pass."""
    if gathers is not None:
        return gathers.wait(start_next=start)
    assert gathered, "the recomputed forward pass has kept the keys of every head group"
    return gathered.popleft()


def _shares(tiles: Sequence[Tile], num_shares: int) -> list[Sequence[Tile]]:
    """Deal tiles, in order, into shares of about equal work, none of them empty if there are enough tiles."""
    shares: list[list[Tile]] = [[] for _ in range(num_shares)]
    total, done, share = sum(tile.num_pairs for tile in tiles), 0, -1
    for left, tile in zip(range(len(tiles), 0, -1), tiles, strict=True):
        by_work = min(num_shares - 1, done * num_shares // max(1, total))
        share = min(share + 1, max(share, by_work, num_shares - left))
        shares[share].append(tile)
        done += tile.num_pairs
    return list(shares)


def _zeros(tensor: Tensor) -> Tensor:
    """Allocate a zeroed accumulator for the gradient of `tensor`, contiguous, in its accumulation dtype."""
    return torch.zeros(tensor.shape, dtype=accumulation_dtype(tensor.dtype), device=tensor.device)
