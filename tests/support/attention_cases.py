# SPDX-License-Identifier: Apache-2.0
"""Cases of distributed attention, and running one on a whole context group to get a result over whole rows."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_csbp.transformer.attention import AttentionContext, block_diffusion_attention
from megatron_csbp.transformer.communication import ContextGroupExchange, KeyValueExchange
from megatron_csbp.transformer.geometry.layer_plans import rank_rows
from megatron_csbp.transformer.geometry.plan import AttentionPlan, plan_attention
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.sample import Sample, active_from_blocks
from megatron_csbp.transformer.geometry.scheme import BlockAssignment, Scheme, Sharding
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask, WindowAnchor
from megatron_csbp.transformer.kernels import AttentionKernel, select_kernel
from megatron_csbp.transformer.traffic_ledger import LayerLedger, TrafficLedger, total
from tests.support.dense_oracle import Problem, Result, dense_attention, random_problem, whole_rows
from tests.support.simulated_group import RankOfGroup, run_ranks

DISTRIBUTED_SCHEMES = (Scheme.CONTEXT_PARALLEL, Scheme.BLOCK_PARALLEL, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL)
TORCH_KERNEL = select_kernel("torch", torch.device("cpu"))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention problem on one context group."""

    scheme: Scheme = Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL
    group_size: int = 2
    block_size: int = 4
    blocks_per_chunk: int = 3
    clean_attention: CleanAttention = CleanAttention.TOKEN_CAUSAL
    assignment: BlockAssignment = BlockAssignment.DUAL_END
    num_query_heads: int = 2
    num_key_value_heads: int = 1
    head_dim: int = 8
    micro_batch_size: int = 1
    num_views: int = 1
    window: int | None = None
    anchor: WindowAnchor = WindowAnchor.POSITION
    documents: tuple[tuple[int, int], ...] | None = None
    active: tuple[tuple[int, ...], ...] | None = None

    @property
    def sequence_length(self) -> int:
        """L."""
        return self.blocks_per_chunk * self.block_size * (1 if self.group_size == 1 else 2 * self.group_size)

    def __str__(self) -> str:
        parts = [
            f"{self.scheme}-P{self.group_size}-M{self.block_size}-n{self.blocks_per_chunk}-{self.clean_attention}",
            f"{self.assignment}-N{self.num_query_heads}K{self.num_key_value_heads}-B{self.micro_batch_size}",
        ]
        if self.num_views > 1:
            parts.append(f"V{self.num_views}")
        if self.window is not None:
            parts.append(f"w{self.window}-{self.anchor}")
        if self.documents is not None:
            parts.append(f"{len(self.documents)}documents")
        if self.active is not None:
            parts.append(f"active{'+'.join(str(len(blocks)) for blocks in self.active)}")
        return "-".join(parts).replace(" ", "_")

    @property
    def sample(self) -> Sample:
        blocks = self.sequence_length // self.block_size
        active = None if self.active is None else active_from_blocks(self.active, blocks)
        documents = None if self.documents is None else np.array(self.documents)
        return Sample(self.sequence_length, self.block_size, self.num_views, documents, active)

    @property
    def sharding(self) -> Sharding:
        return Sharding(self.group_size, self.scheme, self.assignment)

    @property
    def mask(self) -> Mask:
        return Mask(self.clean_attention, self.window, self.anchor)

    def rows(self, rank: int) -> RankRows:
        return rank_rows(self.sample, self.sharding, rank)

    def plan(self, rank: int) -> AttentionPlan:
        return plan_attention(self.rows(rank), self.mask)

    def context(
        self, rank: int, exchange: KeyValueExchange | None, kernel: AttentionKernel = TORCH_KERNEL
    ) -> AttentionContext:
        plan = self.plan(rank)
        return AttentionContext(plan, kernel, self.head_dim**-0.5, exchange if plan.exchanges else None)

    def problem(self, seed: int = 0) -> Problem:
        return random_problem(
            self.sequence_length,
            num_query_heads=self.num_query_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            micro_batch_size=self.micro_batch_size,
            num_views=self.num_views,
            seed=seed,
        )

    def dense(self, problem: Problem) -> Result:
        """Return the truth, on the rows that exist: those of blocks that are not active have no gradient to give."""
        held = torch.zeros(problem.query.shape[0], dtype=torch.bool)
        for rank in range(self.group_size):
            held[whole_rows(self.rows(rank))] = True
        grad_out = problem.grad_out * held[:, None, None, None]
        result = dense_attention(replace(problem, grad_out=grad_out), self.sample, self.mask)
        return replace(result, out=result.out * held[:, None, None, None])


def attend_on_rank(case: Case, problem: Problem, context: AttentionContext) -> Result:
    """Run forward and backward on one rank and return its share of the result, over whole rows.

    Summed over the ranks, the shares are the whole result: a row of the output counts on one rank only, and a gradient
    of the loss at a row enters on that rank only, as in training.
    """
    rank_rows = context.plan.rows
    rows = whole_rows(rank_rows)
    counted = torch.from_numpy(rank_rows.is_counted)
    inputs = [tensor[rows].requires_grad_() for tensor in (problem.query, problem.key, problem.value)]
    out = block_diffusion_attention(inputs[0], inputs[1], inputs[2], context)
    grad_out = problem.grad_out[rows] * counted[:, None, None, None]
    grads = torch.autograd.grad(out, inputs, grad_out)
    whole = Result(*(torch.zeros_like(t) for t in (problem.query, problem.query, problem.key, problem.value)))
    whole.out[rows[counted]] = out.detach()[counted]
    for target, grad in zip((whole.dq, whole.dk, whole.dv), grads, strict=True):
        target.index_add_(0, rows, grad)
    return whole


def add_results(shares: list[Result]) -> Result:
    """Add the ranks' shares, in fp32 or better."""
    names = ("out", "dq", "dk", "dv")
    return Result(
        *(
            torch.stack([getattr(share, name) for share in shares]).sum(
                0, dtype=torch.promote_types(shares[0].out.dtype, torch.float32)
            )
            for name in names
        )
    )


def attend_on_group(
    case: Case,
    problem: Problem,
    kernel: AttentionKernel = TORCH_KERNEL,
    make_exchange: Callable[[RankOfGroup], KeyValueExchange] = ContextGroupExchange,
) -> Result:
    """Run forward and backward on a simulated group (see the fixture `simulated_collectives`)."""

    def run(member: RankOfGroup) -> Result:
        exchange = make_exchange(member) if case.plan(member.rank).exchanges else None
        return attend_on_rank(case, problem, case.context(member.rank, exchange, kernel))

    return add_results(run_ranks(case.group_size, run))


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def gradients_on_group(
    case: Case,
    wrap: Callable[[Attend], Attend],
    adapt: Callable[[AttentionContext], AttentionContext] = lambda context: context,
) -> tuple[list[Tensor], list[int]]:
    """Return all ranks' outputs and gradients, and how many exchanges each rank started."""
    problem = case.problem()

    def run(member: RankOfGroup) -> tuple[list[Tensor], int]:
        exchange, ledger = ContextGroupExchange(member), TrafficLedger()
        exchange.ledger = LayerLedger(ledger, layer=1)
        context = adapt(case.context(member.rank, exchange))
        rows = whole_rows(context.plan.rows)
        inputs = [tensor[rows].requires_grad_() for tensor in (problem.query, problem.key, problem.value)]
        out = wrap(attention(context))(inputs[0], inputs[1], inputs[2])
        out.backward(problem.grad_out[rows])
        assert all(tensor.grad is not None for tensor in inputs)
        grads = [tensor.grad for tensor in inputs if tensor.grad is not None]
        return [out.detach(), *grads], total(ledger.volumes.values()).exchanges

    results = run_ranks(case.group_size, run)
    return [tensor for tensors, _ in results for tensor in tensors], [exchanges for _, exchanges in results]


def attention(context: AttentionContext) -> Attend:
    return lambda query, key, value: block_diffusion_attention(query, key, value, context)


def plain(attend: Attend) -> Attend:
    return attend


def recomputed(attend: Attend) -> Attend:
    return lambda *inputs: checkpoint(attend, *inputs, use_reentrant=True)


def recomputed_by_hooks(attend: Attend) -> Attend:
    return lambda *inputs: checkpoint(attend, *inputs, use_reentrant=False)


def two_layers(attend: Attend) -> Attend:
    """Two layers, to see that what one keeps is not taken for the other's."""
    return lambda query, key, value: attend(attend(query, key, value), key * 2, value - 1)
