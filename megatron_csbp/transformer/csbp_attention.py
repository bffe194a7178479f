# SPDX-License-Identifier: Apache-2.0
"""Exact block-diffusion attention of one rank: the tiles of a plan, merged, with the exchange beside the tiles.

Heads are computed in groups: while the tiles of one group run, the keys of the next are on their way here and the
key gradients of the one before on their way back.

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

from megatron_csbp.transformer.attention_exchange import GatherAhead, PendingScatter, start_scatter
from megatron_csbp.transformer.attention_plan import AttentionPlan
from megatron_csbp.transformer.communication import KeyValueExchange, runs_in_backward
from megatron_csbp.transformer.head_groups import HeadGroup, head_groups
from megatron_csbp.transformer.kernels.interface import AttentionKernel
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
        num_head_groups: G, groups of heads that are exchanged and computed one after the other; divides K.
        grad_payload_dtype: dtype in which key and value gradients cross a link; None for that of the keys.
    """

    plan: AttentionPlan
    kernel: AttentionKernel
    scale: float
    exchange: KeyValueExchange | None = None
    num_head_groups: int = 1
    grad_payload_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        assert self.exchange is not None or not self.plan.exchanged_streams, "this plan needs an exchange"

    @property
    def executor(self) -> TileExecutor:
        """Runs the plan's tiles."""
        return TileExecutor(self.kernel, self.scale)

    def head_groups(self, query_SBND: Tensor, key_SBKD: Tensor) -> Sequence[HeadGroup]:
        """Return the groups of heads of these tensors."""
        return head_groups(query_SBND.shape[2], key_SBKD.shape[2], self.num_head_groups)

    def gather_ahead(self, local: KeyValue, groups: Sequence[HeadGroup]) -> GatherAhead | None:
        """Start gathering the groups' keys and values, one after the other; None if the scheme exchanges nothing."""
        if not self.plan.exchanged_streams:
            return None
        assert self.exchange is not None
        return GatherAhead((_heads(local, group.keys) for group in groups), self.plan, self.exchange)


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
    """Group by group: run the local tiles; wait; start the next group's gather; run the gathered tiles; merge.

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
    # Not zeroed: the diagonal tiles come first and write every row once.
    out_SBND = torch.empty(query_SBND.shape, dtype=query_SBND.dtype, device=query_SBND.device)
    lse_SBN = torch.empty(query_SBND.shape[:3], dtype=dtype, device=query_SBND.device)
    for heads in groups:
        pending = None if gathers is None else gathers.take()
        query, group_out = query_SBND[:, :, heads.queries], out_SBND[:, :, heads.queries]
        sum_out = group_out if dtype == out_SBND.dtype else torch.empty_like(group_out, dtype=dtype)
        merged = Merged(sum_out, lse_SBN[:, :, heads.queries])
        executor.forward_local(plan, query, _heads(local, heads.keys), merged)
        if pending is not None:
            gathered = pending.wait()
            for tile in plan.gathered_tiles:
                executor.forward(tile, query, gathered, merged)
            pending.finish()
            if kept is not None:
                kept.append(gathered)
            del gathered, pending  # before the gather after the next starts: two groups' keys at most
        if sum_out is not group_out:
            group_out.copy_(sum_out)
    return Merged(out_SBND, lse_SBN)


def attention_backward(
    queries: QuerySide, local: KeyValue, context: AttentionContext, gathered: deque[KeyValue] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Group by group: gather beside half of the local tiles; reduce-scatter beside the other half and the next group.

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
    grads = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (queries.query, *local)]
    before: _GroupGradients | None = None
    for heads in groups:
        pending = None if gathers is None else gathers.take()
        side, keys = _query_heads(queries, heads.queries), _heads(local, heads.keys)
        sums = _GroupGradients(grads, heads)
        beside_scatter = executor.backward_local(plan, side, keys, sums.query, sums.keys)
        if before is not None:
            before.finish()  # before the next gather starts: one collective under way at a time
        sent = None
        if plan.exchanged_streams:
            group_keys = _next_of(gathered) if pending is None else pending.wait()
            sent = KeyValue(_zeros(group_keys.key), _zeros(group_keys.value))
            for tile in plan.gathered_tiles:
                executor.backward(tile, side, group_keys, sums.query, sent)
            if pending is not None:
                pending.finish()
            del group_keys, pending  # before the gather after the next starts: two groups' keys at most
        if sent is not None:
            sums.send(sent, context)
        for tile in beside_scatter:
            executor.backward(tile, side, keys, sums.query, sums.keys)
        sums.finish_query()
        before = sums
    assert before is not None, "a layer has heads"
    before.finish()
    grad_query_SBND, grad_key_SBKD, grad_value_SBKD = grads
    return grad_query_SBND, grad_key_SBKD, grad_value_SBKD


class _GroupGradients:
    """One head group's gradients: sums in the accumulation dtype, and their place among those of all heads.

    Attributes:
        query: gradient of the queries, [S, B, N, D].
        keys: gradients of this rank's keys and values, [S, B, K, D].
    """

    def __init__(self, grads: Sequence[Tensor], heads: HeadGroup) -> None:
        """Start sums of nothing.

        Args:
            grads: gradients of query, key and value of all heads, in the input dtype; not initialised.
            heads: the group.
        """
        slices = (heads.queries, heads.keys, heads.keys)
        self._places = [grad[:, :, of_group] for grad, of_group in zip(grads, slices, strict=True)]
        self.query, key, value = (
            place.zero_() if place.dtype == accumulation_dtype(place.dtype) else _zeros(place)
            for place in self._places
        )
        self.keys = KeyValue(key, value)
        self._scatter: PendingScatter | None = None

    def send(self, gathered_grads: KeyValue, context: AttentionContext) -> None:
        """Start to add up the gathered keys' gradients [R, B, K, D] over the ranks."""
        assert context.exchange is not None
        payload_dtype = context.grad_payload_dtype or self._places[1].dtype
        self._scatter = start_scatter(gathered_grads, self.keys, payload_dtype, context.plan, context.exchange)

    def finish_query(self) -> None:
        """Put the gradient of the queries in its place."""
        self.query = _put(self._places[0], self.query)

    def finish(self) -> None:
        """Wait for the other ranks' share of the gradients of keys and values, and put them in their place."""
        if self._scatter is not None:
            self._scatter.add_to(self.keys)
            self._scatter = None
        self.keys = KeyValue(*map(_put, self._places[1:], self.keys))


def _put(place: Tensor, total: Tensor) -> Tensor:
    """Copy a sum into its place, unless that is where it was added up, and return the place."""
    return place if total is place else place.copy_(total)


def _heads(tensors: KeyValue, heads: slice) -> KeyValue:
    return KeyValue(tensors.key[:, :, heads], tensors.value[:, :, heads])


def _query_heads(side: QuerySide, heads: slice) -> QuerySide:
    merged = Merged(side.merged.out[:, :, heads], side.merged.lse[:, :, heads])
    return QuerySide(side.grad_out[:, :, heads], side.query[:, :, heads], merged)


def _next_of(gathered: deque[KeyValue] | None) -> KeyValue:
    assert gathered, "the recomputed forward pass has kept the keys of every head group"
    return gathered.popleft()


def _zeros(tensor: Tensor) -> Tensor:
    """Return a contiguous sum of nothing for the gradient of `tensor`, in its accumulation dtype."""
    return torch.zeros(tensor.shape, dtype=accumulation_dtype(tensor.dtype), device=tensor.device)
