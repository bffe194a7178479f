# SPDX-License-Identifier: Apache-2.0
"""What crosses a link in a delta-net layer: one small tensor for every clean chunk, gathered by all ranks.

Both passes only gather. Backward, every rank needs the transpose of what it got forward: gradients that other ranks
have computed for its chunks. These gradients are as small as what was sent forward, so all ranks gather all of them
and each adds up its own, in position order: the result does not depend on a reduction's order, and the maps gathered
forward need not be kept.

Shapes: c chunks of this rank, 2P chunks of the sequence, B micro-batch, H heads, K key dim, V value dim, C rows of a
chunk, X channels of the convolution, R rows that it looks back.
"""

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_csbp.transformer.annotations import annotate
from megatron_csbp.transformer.collectives import start_all_gathers
from megatron_csbp.transformer.communication import runs_in_backward
from megatron_csbp.transformer.delta_net.plan import DeltaNetPlan
from megatron_csbp.transformer.geometry.scheme import CopyKind
from megatron_csbp.transformer.streams import side_stream
from megatron_csbp.transformer.traffic_ledger import Collective, Content, Direction, LayerLedger
from megatron_csbp.transformer.wait_clock import WaitClock


class ChunkExchange(Protocol):
    """What a delta-net layer asks of the network. Every rank calls it in the same order, whatever its data."""

    def gather(self, own: Tensor, plan: DeltaNetPlan, content: Content) -> Tensor:
        """Return the tensors [2P, ...] of all chunks in position order, given those [c, ...] of this rank's."""
        ...


class ContextGroupChunkExchange:
    """The exchange over a torch.distributed process group.

    Attributes:
        ledger: where every exchange is entered, or None.
        clock: what measures the waits, or None.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Take the group, whose rank order is the plan's; nothing is sent yet."""
        self.ledger: LayerLedger | None = None
        self.clock: WaitClock | None = None
        self._group = group

    def gather(self, own: Tensor, plan: DeltaNetPlan, content: Content) -> Tensor:
        """See `ChunkExchange.gather`."""
        own = own.contiguous()
        everyones = own.new_empty(len(plan.owners), *own.shape[1:])
        if self.ledger is not None:
            direction = Direction.BACKWARD if runs_in_backward() else Direction.FORWARD
            remote_bytes = everyones.nbytes // plan.group_size * (plan.group_size - 1)
            self.ledger.add(CopyKind.CLEAN, Collective.GATHER, direction, everyones.nbytes, remote_bytes, content)
        with annotate("gather", content):
            works = side_stream(own.device).launch(
                lambda async_op: start_all_gathers([(everyones, own)], self._group, coalesce=False, async_op=async_op),
                (everyones, own),
            )
            if self.clock is not None:
                self.clock.start()
            for work in works:
                work.wait()
            if self.clock is not None:
                self.clock.stop()
        return everyones[torch.tensor(plan.gather_order, device=own.device)]


def incoming_states(map_cBHKW: Tensor, plan: DeltaNetPlan, exchange: ChunkExchange) -> Tensor:
    """Return the state before each of this rank's chunks, [c, B, H, K, V].

    Args:
        map_cBHKW: affine map [U, A] of each of this rank's chunks, W = V + K; fp32 or fp64.
        plan: who owns which chunk.
        exchange: the network.
    """
    states_cBHKV: Tensor = _IncomingStates.apply(map_cBHKW, plan, exchange)
    return states_cBHKV


class _IncomingStates(torch.autograd.Function):
    """Composes the maps of all chunks before each chunk; backward, the transposed maps of all chunks behind it."""

    @staticmethod
    def forward(ctx: Any, map_cBHKW: Tensor, plan: DeltaNetPlan, exchange: ChunkExchange) -> Tensor:
        key_dim, width = map_cBHKW.shape[-2:]
        maps = exchange.gather(map_cBHKW, plan, Content.STATE_MAPS)
        state_BHKV = map_cBHKW.new_zeros(*map_cBHKW.shape[1:-1], width - key_dim)
        states = []
        for chunk in range(plan.own_chunks[-1] + 1):
            if chunk in plan.own_chunks:
                states.append(state_BHKV)
            write_BHKV, through_BHKK = torch.split(maps[chunk], [width - key_dim, key_dim], -1)
            state_BHKV = through_BHKK @ state_BHKV + write_BHKV
        states_cBHKV = torch.stack(states)
        ctx.save_for_backward(map_cBHKW[..., -key_dim:], states_cBHKV)
        ctx.plan, ctx.exchange = plan, exchange
        return states_cBHKV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_cBHKV: Tensor) -> tuple[Tensor, None, None]:
        through_cBHKK, states_cBHKV = ctx.saved_tensors
        plan: DeltaNetPlan = ctx.plan
        sizes = [grad_cBHKV.shape[-1], through_cBHKK.shape[-1]]
        everyones = ctx.exchange.gather(torch.cat([grad_cBHKV, through_cBHKK], -1), plan, Content.STATE_MAPS)
        behind_BHKV = torch.zeros_like(grad_cBHKV[0])  # gradient of the state behind a chunk
        grads: list[Tensor] = []
        for chunk in range(len(plan.owners) - 1, plan.own_chunks[0] - 1, -1):
            if chunk in plan.own_chunks:
                state_BHKV = states_cBHKV[plan.own_chunks.index(chunk)]
                grads.insert(0, torch.cat([behind_BHKV, behind_BHKV @ state_BHKV.transpose(-1, -2)], -1))
            grad_BHKV, through_BHKK = torch.split(everyones[chunk], sizes, -1)
            behind_BHKV = grad_BHKV + through_BHKK.transpose(-1, -2) @ behind_BHKV
        return torch.stack(grads), None, None


def rows_before_chunks(rows_cCBX: Tensor, look_back: int, plan: DeltaNetPlan, exchange: ChunkExchange) -> Tensor:
    """Return the R rows before each of this rank's chunks, [c, R, B, X]; zeros before the first position.

    Args:
        rows_cCBX: the rows of this rank's chunks.
        look_back: R.
        plan: who owns which chunk.
        exchange: the network.
    """
    before_cRBX: Tensor = _RowsBeforeChunks.apply(rows_cCBX, look_back, plan, exchange)
    return before_cRBX


class _RowsBeforeChunks(torch.autograd.Function):
    """Gathers the last rows of every chunk; backward, the gradients of the rows before every chunk."""

    @staticmethod
    def forward(ctx: Any, rows_cCBX: Tensor, look_back: int, plan: DeltaNetPlan, exchange: ChunkExchange) -> Tensor:
        sent = min(look_back, rows_cCBX.shape[1])
        ctx.plan, ctx.exchange, ctx.shape, ctx.sent, ctx.look_back = plan, exchange, rows_cCBX.shape, sent, look_back
        tails = exchange.gather(rows_cCBX[:, -sent:], plan, Content.CONVOLUTION_ROWS).flatten(0, 1)
        padded = torch.cat([tails.new_zeros(look_back, *tails.shape[1:]), tails])
        return torch.stack([padded[chunk * sent : chunk * sent + look_back] for chunk in plan.own_chunks])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_cRBX: Tensor) -> tuple[Tensor, None, None, None]:
        plan: DeltaNetPlan = ctx.plan
        sent, look_back = ctx.sent, ctx.look_back
        everyones = ctx.exchange.gather(grad_cRBX, plan, Content.CONVOLUTION_ROWS)
        padded = everyones.new_zeros(look_back + len(plan.owners) * sent, *everyones.shape[2:])
        for chunk, grad_RBX in enumerate(everyones):
            padded[chunk * sent : chunk * sent + look_back] += grad_RBX
        grad_cCBX = grad_cRBX.new_zeros(ctx.shape)
        for own, chunk in enumerate(plan.own_chunks):
            first = look_back + chunk * sent
            grad_cCBX[own, -sent:] = padded[first : first + sent]
        return grad_cCBX, None, None, None
