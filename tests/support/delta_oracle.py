# SPDX-License-Identifier: Apache-2.0
"""The gated delta net of block diffusion, row by row, and problems to compare it with.

Shapes: L positions, B micro-batch, X channels, H value heads, K key dim, V value dim, M block length. Copy 0 is the
clean one, copy 1 + v is view v.
"""

from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_csbp.transformer.delta_net.convolution import ShortConvolution
from megatron_csbp.transformer.delta_net.delta_rule import (
    STATE_BYTES,
    DeltaHeads,
    DeltaNetContext,
    block_diffusion_delta_rule,
)
from megatron_csbp.transformer.delta_net.exchange import ChunkExchange, ContextGroupChunkExchange
from megatron_csbp.transformer.delta_net.from_rows import plan_from_rows
from megatron_csbp.transformer.delta_net.plan import DeltaNetPlan
from megatron_csbp.transformer.delta_net.rows import DeltaRuleKernel
from megatron_csbp.transformer.delta_net.torch_kernel import TorchDeltaRule
from megatron_csbp.transformer.geometry.layer_plans import rank_rows
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import BlockAssignment, Scheme, Sharding
from tests.support.simulated_group import RankOfGroup, run_ranks

HEADS = DeltaHeads(key_heads=1, value_heads=2, key_dim=5, value_dim=4)
LOOK_BACK = 3


@dataclass(frozen=True)
class DeltaProblem:
    """Inputs of all copies and parameters; every one gets a gradient."""

    qkv: Tensor
    log_decay: Tensor
    beta: Tensor
    weight: Tensor
    bias: Tensor
    grad_out: Tensor

    @property
    def inputs(self) -> list[Tensor]:
        return [self.qkv, self.log_decay, self.beta, self.weight, self.bias]


@dataclass(frozen=True)
class DeltaResult:
    """Outputs [1 + views, L, B, H, V] and the gradient of each input."""

    out: Tensor
    grads: list[Tensor]

    def errors(self, expected: "DeltaResult") -> dict[str, float]:
        """Return the largest difference of the outputs and of each gradient, over the largest entry."""
        names = ["out", *(field.name for field in fields(DeltaProblem))]
        pairs = zip(names, [self.out, *self.grads], [expected.out, *expected.grads], strict=False)
        return {name: ((found - wanted).abs().max() / wanted.abs().max()).item() for name, found, wanted in pairs}


@dataclass(frozen=True, kw_only=True)
class DeltaCase:
    """One layer's problem on one context group; documents start at blocks, and may end in padding."""

    group_size: int = 2
    block_size: int = 4
    blocks_per_chunk: int = 3
    views: int = 1
    batch: int = 1
    document_blocks: tuple[int, ...] = (0,)
    padding: int = 0
    inactive_blocks: tuple[int, ...] = ()
    slow_decay: bool = True
    scheme: Scheme = Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL
    assignment: BlockAssignment = BlockAssignment.DUAL_END
    state_bytes: int = STATE_BYTES

    def __str__(self) -> str:
        documents = "-".join(map(str, self.document_blocks))
        return (
            f"{self.scheme}-P{self.group_size}-M{self.block_size}-n{self.blocks_per_chunk}-views{self.views}-"
            f"B{self.batch}-documents{documents}-padding{self.padding}-"
            f"without{len(self.inactive_blocks)}-{'slow' if self.slow_decay else 'fast'}-{self.assignment}-"
            f"{self.state_bytes}"
        ).replace(" ", "_")

    @property
    def length(self) -> int:
        return self.block_size * self.blocks_per_chunk * (1 if self.group_size == 1 else 2 * self.group_size)

    @property
    def documents(self) -> tuple[int, ...]:
        return tuple(block * self.block_size for block in self.document_blocks)

    @property
    def inactive(self) -> Tensor:
        """Which rows of which copies no rank computes, bool [1 + views, L]."""
        inactive = torch.zeros(1 + self.views, self.length // self.block_size, dtype=torch.bool)
        inactive[1:, list(self.inactive_blocks)] = True
        return inactive.repeat_interleave(self.block_size, 1)

    def rows(self, rank: int) -> RankRows:
        """Return a rank's rows."""
        stops = [stop - self.padding for stop in (*self.documents[1:], self.length)]
        sample = Sample(
            self.length,
            self.block_size,
            self.views,
            np.array([*zip(self.documents, stops, strict=True)]),
            ~self.inactive[1:, :: self.block_size].numpy() if self.inactive_blocks else None,
        )
        scheme = Scheme.SINGLE if self.group_size == 1 else self.scheme
        return rank_rows(sample, Sharding(self.group_size, scheme, self.assignment, keeps_blocks_home=True), rank)

    def plan(self, rank: int) -> tuple[DeltaNetPlan, Tensor]:
        """Return a rank's plan, and for each of its rows the row among those of all copies [(1 + views) L]."""
        rows = self.rows(rank)
        whole = rows.sample_positions + (1 + rows.copies) * self.length
        return plan_from_rows(rows), torch.from_numpy(whole)

    def problem(self, seed: int = 0, heads: DeltaHeads = HEADS) -> DeltaProblem:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(shape, generator=generator, dtype=torch.float64)

        channels = heads.key_dim * heads.key_heads * 2 + heads.value_dim * heads.value_heads
        copies = (1 + self.views, self.length, self.batch)
        return DeltaProblem(
            qkv=normal(*copies, channels),
            log_decay=-uniform(*copies, heads.value_heads) * (1 / self.length if self.slow_decay else 2.0),
            beta=(0.02 + 0.1 * uniform(*copies, heads.value_heads)) * (1 if self.slow_decay else 8),
            weight=normal(channels, LOOK_BACK + 1) * 0.5,
            bias=normal(channels) * 0.1,
            grad_out=normal(*copies, heads.value_heads, heads.value_dim).masked_fill(
                self.inactive[..., None, None, None], 0
            ),
        )


def sequential(case: DeltaCase, problem: DeltaProblem, heads: DeltaHeads = HEADS) -> DeltaResult:
    """Run the recurrence row by row over clean[:start] ++ corrupted block, for every block of every view."""
    inputs = [tensor.clone().requires_grad_() for tensor in problem.inputs]
    out = recurrence(case, tuple(inputs), heads)
    computed = out.detach().masked_fill(case.inactive[..., None, None, None], 0)
    return DeltaResult(computed, list(torch.autograd.grad(out, inputs, problem.grad_out)))


def recurrence(case: DeltaCase, inputs: tuple[Tensor, ...], heads: DeltaHeads) -> Tensor:
    """Return the outputs [1 + views, L, B, H, V], with their graph; inputs as in `DeltaProblem`."""
    outs: list[list[Tensor]] = [[] for _ in range(1 + case.views)]
    for document, end in pairwise([*case.documents, case.length]):
        _run_document(case, document, end, inputs, heads, outs)
    return torch.stack([torch.cat(rows) for rows in outs])


def _run_document(
    case: DeltaCase,
    document: int,
    end: int,
    inputs: tuple[Tensor, ...],
    heads: DeltaHeads,
    outs: list[list[Tensor]],
) -> None:
    qkv, log_decay, beta, weight, bias = inputs
    state = qkv.new_zeros(case.batch, heads.value_heads, heads.key_dim, heads.value_dim)
    convolved = _convolve(qkv[0, document:end], weight, bias)
    for start in range(document, end, case.block_size):
        own = slice(start, start + case.block_size)
        for view in range(case.views):
            # Its own recurrence: of the clean rows before it only their last state is not computed again.
            rows = torch.cat([qkv[0, document:start], qkv[1 + view, own]])
            rows = _convolve(rows, weight, bias)[start - document :]
            outs[1 + view].append(_recur(rows, log_decay[1 + view, own], beta[1 + view, own], state, heads)[0])
        rows = convolved[start - document : start - document + case.block_size]
        out, state = _recur(rows, log_decay[0, own], beta[0, own], state, heads)
        outs[0].append(out)


def _convolve(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    padded = torch.cat([rows.new_zeros(LOOK_BACK, *rows.shape[1:]), rows])
    taps = [padded[tap : tap + rows.shape[0]] * weight[:, tap] for tap in range(LOOK_BACK + 1)]
    return F.silu(sum(taps, bias))


def _recur(rows: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, heads: DeltaHeads) -> tuple[Tensor, Tensor]:
    width = heads.key_heads * heads.key_dim
    query, key, value = rows.split([width, width, heads.value_heads * heads.value_dim], -1)
    query, key = (t.unflatten(-1, (heads.key_heads, heads.key_dim)) for t in (query, key))
    query, key = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (query, key))
    query, key = (t.repeat_interleave(heads.value_heads // heads.key_heads, -2) for t in (query, key))
    value = value.unflatten(-1, (heads.value_heads, heads.value_dim))
    out = []
    for q, k, v, g, b in zip(query, key, value, log_decay, beta, strict=True):
        state = state * g.exp()[..., None, None]
        change = (v - torch.einsum("bhkv,bhk->bhv", state, k)) * b[..., None]
        state = state + torch.einsum("bhk,bhv->bhkv", k, change)
        out.append(torch.einsum("bhkv,bhk->bhv", state, q) * heads.key_dim**-0.5)
    return torch.stack(out), state


def run_on_rank(
    case: DeltaCase,
    problem: DeltaProblem,
    rank: int,
    exchange: ChunkExchange | None,
    kernel: DeltaRuleKernel | None = None,
    heads: DeltaHeads = HEADS,
) -> DeltaResult:
    """Run one rank; summed over the ranks, the results are the whole one."""
    plan, rows = case.plan(rank)
    counted = torch.from_numpy(case.rows(rank).is_counted)
    inputs = [tensor.flatten(0, 1)[rows].requires_grad_() for tensor in problem.inputs[:3]]
    weights = [tensor.clone().requires_grad_() for tensor in problem.inputs[3:]]
    context = DeltaNetContext(plan, kernel or TorchDeltaRule(), exchange, case.state_bytes)
    out = block_diffusion_delta_rule(*inputs, ShortConvolution(*weights), heads, context)
    grad_out = problem.grad_out.flatten(0, 1)[rows] * counted[:, None, None, None]
    grads = torch.autograd.grad(out, [*inputs, *weights], grad_out)
    whole_out = torch.zeros_like(problem.grad_out).flatten(0, 1)
    whole_out[rows[counted]] = out.detach()[counted]
    whole_grads = [
        torch.zeros_like(tensor).flatten(0, 1).index_add_(0, rows, grad).view_as(tensor)
        for tensor, grad in zip(problem.inputs[:3], grads, strict=False)
    ]
    return DeltaResult(whole_out.view_as(problem.grad_out), [*whole_grads, *grads[3:]])


def run_on_group(case: DeltaCase, problem: DeltaProblem, kernel: DeltaRuleKernel | None = None) -> DeltaResult:
    """Run all ranks of a simulated group (see the fixture `simulated_collectives`) and add up."""

    def run(member: RankOfGroup) -> DeltaResult:
        exchange = ContextGroupChunkExchange(member) if case.plan(member.rank)[0].exchanges else None
        return run_on_rank(case, problem, member.rank, exchange, kernel)

    return add_results(run_ranks(case.group_size, run))


def add_results(shares: list[DeltaResult]) -> DeltaResult:
    """Add the ranks' shares."""
    grads = [torch.stack(grads).sum(0) for grads in zip(*(share.grads for share in shares), strict=True)]
    return DeltaResult(torch.stack([share.out for share in shares]).sum(0), grads)
