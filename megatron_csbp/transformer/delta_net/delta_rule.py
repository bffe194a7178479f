# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule of one rank under block diffusion: short convolution, state maps, clean rows, blocks.

Each rank carries the affine map of its chunks, gathers those of all, and so knows the state before each of its
chunks. From there it runs its clean rows, and its corrupted blocks from the states at their starts.

States at block starts are many: K x V numbers for a head and a block. They are alive for one segment of the chunks at
a time. Of the others only the state at the segment's start is kept, and backward computes the segment again.

Shapes: S local rows, B micro-batch, X channels of queries, keys and values together, H value heads, K key dim, V value
dim, c chunks of C rows, n blocks of M rows, G = c B or n B sequences, J steps of a chunk.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_csbp.transformer.delta_net.convolution import (
    ShortConvolution,
    convolve_blocks,
    convolve_chunks,
    with_rows_before,
)
from megatron_csbp.transformer.delta_net.costs import segment_steps
from megatron_csbp.transformer.delta_net.exchange import ChunkExchange, incoming_states
from megatron_csbp.transformer.delta_net.pieces import BlockBatch, Pieces, pieces_of
from megatron_csbp.transformer.delta_net.plan import DeltaNetPlan
from megatron_csbp.transformer.delta_net.rows import DeltaRows, DeltaRuleKernel, identity_maps, state_dtype

STATE_BYTES = 256 * 2**20
"""Default bound on the states that a layer has alive at a time."""


@dataclass(frozen=True)
class DeltaHeads:
    """Heads of a delta-net layer on one rank.

    Attributes:
        key_heads: heads of queries and keys; they divide `value_heads`.
        value_heads: H.
        key_dim: K.
        value_dim: V.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    def rows(self, qkv_GTX: Tensor, log_decay_GTH: Tensor, beta_GTH: Tensor) -> DeltaRows:
        """Return rows for the kernel: queries and keys of unit length, one for each value head."""
        width = self.key_heads * self.key_dim
        query, key, value = torch.split(qkv_GTX, [width, width, self.value_heads * self.value_dim], -1)
        query, key = (_unit(torch.unflatten(tensor, -1, (self.key_heads, self.key_dim))) for tensor in (query, key))
        repeats = self.value_heads // self.key_heads
        if repeats > 1:
            query, key = query.repeat_interleave(repeats, 2), key.repeat_interleave(repeats, 2)
        value = torch.unflatten(value, -1, (self.value_heads, self.value_dim))
        return DeltaRows(query, key, value, log_decay_GTH, beta_GTH)


def _unit(tensor: Tensor) -> Tensor:
    """Scale to unit length in the last dim, as Megatron's and Transformers' layers do."""
    exact = tensor.to(state_dtype(tensor.dtype))
    return (exact * (exact.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(tensor.dtype)


@dataclass(frozen=True)
class DeltaNetContext:
    """All that one layer needs besides its tensors.

    Attributes:
        plan: what this rank computes.
        kernel: computes the rule.
        exchange: the network; None if the plan exchanges nothing.
        state_bytes: bound on the states that are alive at a time; with a single step of a chunk they may be more.
    """

    plan: DeltaNetPlan
    kernel: DeltaRuleKernel
    exchange: ChunkExchange | None = None
    state_bytes: int = STATE_BYTES


def block_diffusion_delta_rule(
    qkv_SBX: Tensor,
    log_decay_SBH: Tensor,
    beta_SBH: Tensor,
    convolution: ShortConvolution,
    heads: DeltaHeads,
    context: DeltaNetContext,
) -> Tensor:
    """Run a delta-net layer's recurrence over this rank's rows of all copies.

    Args:
        qkv_SBX: queries, keys and values before the convolution, in local row order.
        log_decay_SBH: logarithm of the decay, in fp32 or better.
        beta_SBH: strength of the write, in (0, 1).
        convolution: weights of the short convolution.
        heads: sizes.
        context: plan, kernel and exchange.

    Returns:
        Outputs [S, B, H, V] in the dtype of `qkv_SBX`.
    """
    plan, batch = context.plan, qkv_SBX.shape[1]
    assert qkv_SBX.shape[0] == plan.num_rows, f"the plan has {plan.num_rows} rows, not {qkv_SBX.shape[0]}"
    pieces = pieces_of(plan, _segment_steps(context, heads, batch))
    (clean, *gates), (blocks, *block_gates) = zip(
        *(pieces.split(tensor) for tensor in (qkv_SBX, log_decay_SBH, beta_SBH)), strict=True
    )
    extended_cTBX = with_rows_before(clean, convolution.look_back, plan, context.exchange)
    clean_rows = _rows(heads, convolve_chunks(extended_cTBX, convolution, plan), *gates)
    block_rows = [
        _rows(heads, convolve_blocks(of_batch, b.blocks, extended_cTBX, convolution, plan), log_decay, beta)
        for b, of_batch, log_decay, beta in zip(pieces.batches, blocks, *block_gates, strict=True)
    ]
    scan = _Scan(context, pieces, batch)
    state_GHKV = scan.incoming(clean_rows) if plan.exchanges else _zeros(clean_rows)
    clean_out, block_outs = scan.run(clean_rows, block_rows, state_GHKV)
    return pieces.join(_unbatched(clean_out, batch), [_unbatched(out, batch) for out in block_outs])


def _segment_steps(context: DeltaNetContext, heads: DeltaHeads, batch: int) -> int:
    """Return how many steps of the chunks have their states alive together."""
    plan = context.plan
    step_bytes = context.kernel.state_bytes_of_block(plan.step, heads.key_dim, heads.value_dim)
    step_bytes *= heads.value_heads * batch * len(plan.chunks)
    return segment_steps(plan, step_bytes, context.state_bytes)


def _rows(heads: DeltaHeads, qkv_gTBX: Tensor, log_decay_gTBH: Tensor, beta_gTBH: Tensor) -> DeltaRows:
    """Return rows for the kernel with G = g B sequences."""
    tensors = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (qkv_gTBX, log_decay_gTBH, beta_gTBH))
    return heads.rows(*tensors)


def _unbatched(out_GTHV: Tensor, batch: int) -> Tensor:
    """Return outputs [G, T, H, V] as [g, T, B, H, V]."""
    return torch.unflatten(out_GTHV, 0, (-1, batch)).transpose(1, 2)


def _zeros(rows: DeltaRows) -> Tensor:
    return rows.key_GTHK.new_zeros(rows.state_shape(), dtype=state_dtype(rows.value_GTHV.dtype))


@dataclass(frozen=True)
class _Scan:
    """The recurrence of one call, segment by segment."""

    context: DeltaNetContext
    pieces: Pieces
    batch: int

    @cached_property
    def _segments(self) -> list[range]:
        return [self.pieces.steps_of(segment) for segment in range(self.pieces.num_segments)]

    def _keeps(self, steps: range) -> list[list[bool]]:
        """Return for every sequence and step of a segment whether the state before it is kept."""
        return [[chunk[step] for step in steps] for chunk in self.context.plan.keeps for _ in range(self.batch)]

    def _split(self, rows: DeltaRows) -> list[DeltaRows]:
        """Return the clean rows of each segment."""
        lengths = [len(steps) * self.context.plan.step for steps in self._segments]
        return [
            DeltaRows(*part)
            for part in zip(*(torch.split(tensor, lengths, 1) for tensor in rows.tensors), strict=True)
        ]

    def _call[T](self, function: Callable[..., T], *tensors: Tensor) -> T:
        """Call a segment's function; of several segments, each is computed again in backward."""
        if len(self._segments) == 1 or not torch.is_grad_enabled():
            return function(*tensors)
        result: T = checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)
        return result

    def incoming(self, rows: DeltaRows) -> Tensor:
        """Return the states before this rank's chunks, [G, H, K, V], from the affine maps of all chunks."""
        assert self.context.exchange is not None
        maps_GHKW = identity_maps(rows)
        for steps, segment in zip(self._segments, self._split(rows), strict=True):
            maps_GHKW = self._call(partial(self._advance, steps), maps_GHKW, *segment.tensors)
        maps_cBHKW = torch.unflatten(maps_GHKW, 0, (-1, self.batch))
        states = incoming_states(maps_cBHKW, self.context.plan, self.context.exchange)
        return states.flatten(0, 1)

    def _advance(self, steps: range, maps_GHKW: Tensor, *rows: Tensor) -> Tensor:
        kernel, step = self.context.kernel, self.context.plan.step
        return kernel.advance(DeltaRows(*rows), maps_GHKW, step, self._keeps(steps))

    def run(self, rows: DeltaRows, block_rows: Sequence[DeltaRows], state_GHKV: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the outputs of the clean rows [G, C, H, V], and of each batch of blocks [G, M, H, V]."""
        blocks = [self._split_blocks(b, rows) for b, rows in zip(self.pieces.batches, block_rows, strict=True)]
        outs: list[list[Tensor]] = []
        for segment, (steps, clean) in enumerate(zip(self._segments, self._split(rows), strict=True)):
            of_segment = [tensor for batch in blocks for tensor in batch[segment].tensors]
            state_GHKV, *out = self._call(
                partial(self._segment, segment, steps), state_GHKV, *clean.tensors, *of_segment
            )
            outs.append(out)
        clean_outs, *block_outs = zip(*outs, strict=True)
        return torch.cat(clean_outs, 1), [torch.cat(out) for out in block_outs]

    def _split_blocks(self, batch: BlockBatch, rows: DeltaRows) -> list[DeltaRows]:
        """Return the rows of a batch's blocks, by the segment that they start in."""
        counts = [count * self.batch for count in batch.counts]
        return [
            DeltaRows(*part) for part in zip(*(torch.split(tensor, counts) for tensor in rows.tensors), strict=True)
        ]

    def _segment(self, segment: int, steps: range, state_GHKV: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the state behind a segment, and the outputs of its clean rows and of its blocks by batch."""
        plan, kernel = self.context.plan, self.context.kernel
        clean, *blocks = (DeltaRows(*tensors[first : first + 5]) for first in range(0, len(tensors), 5))
        out, starts_GJHKV, state_GHKV = kernel.clean(clean, state_GHKV, plan.step, self._keeps(steps))
        starts = torch.unflatten(starts_GJHKV, 0, (-1, self.batch)).transpose(1, 2).flatten(0, 1)  # [c J, B, H, K, V]
        outs = [out]
        for batch, rows in zip(self.pieces.batches, blocks, strict=True):
            first = sum(batch.counts[:segment])
            own = batch.blocks[first : first + batch.counts[segment]]
            index = [plan.chunk_of(block) * len(steps) + plan.step_of(block) - steps.start for block in own]
            states = starts[torch.tensor(index, device=starts.device, dtype=torch.int64)].flatten(0, 1)
            outs.append(kernel.blocks(rows, states) if own else rows.value_GTHV)
        return (state_GHKV, *outs)
