# SPDX-License-Identifier: Apache-2.0
"""Cases of distributed attention, and running one on a whole context group to get a result over whole rows."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_csbp.transformer.attention_plan import AttentionPlan, CleanAttention
from megatron_csbp.transformer.communication import ContextGroupExchange, KeyValueExchange
from megatron_csbp.transformer.csbp_attention import AttentionContext, block_diffusion_attention
from megatron_csbp.transformer.kernels import AttentionKernel, select_kernel
from megatron_csbp.transformer.layout import BlockAssignment, Scheme, SequenceLayout
from megatron_csbp.transformer.traffic_ledger import LayerLedger, TrafficLedger, total
from tests.support.dense_oracle import Problem, Result, random_problem, whole_rows
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

    @property
    def sequence_length(self) -> int:
        """L."""
        return self.blocks_per_chunk * self.block_size * (1 if self.group_size == 1 else 2 * self.group_size)

    def __str__(self) -> str:
        return (
            f"{self.scheme}-P{self.group_size}-M{self.block_size}-n{self.blocks_per_chunk}-{self.clean_attention}-"
            f"{self.assignment}-N{self.num_query_heads}K{self.num_key_value_heads}-B{self.micro_batch_size}"
        ).replace(" ", "_")

    def layout(self, rank: int) -> SequenceLayout:
        return SequenceLayout(
            sequence_length=self.sequence_length,
            block_size=self.block_size,
            group_size=self.group_size,
            rank=rank,
            scheme=self.scheme,
            assignment=self.assignment,
        )

    def plan(self, rank: int) -> AttentionPlan:
        return AttentionPlan(self.layout(rank), self.clean_attention)

    def context(
        self, rank: int, exchange: KeyValueExchange | None, kernel: AttentionKernel = TORCH_KERNEL
    ) -> AttentionContext:
        plan = self.plan(rank)
        return AttentionContext(plan, kernel, self.head_dim**-0.5, exchange if plan.exchanged_streams else None)

    def problem(self, seed: int = 0) -> Problem:
        return random_problem(
            self.sequence_length,
            num_query_heads=self.num_query_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            micro_batch_size=self.micro_batch_size,
            seed=seed,
        )


def attend_on_rank(case: Case, problem: Problem, context: AttentionContext) -> Result:
    """Run forward and backward on one rank and return its share of the result, over whole rows.

    Summed over the ranks, the shares are the whole result: a row of the output counts on one rank only, and a gradient
    of the loss at a row enters on that rank only, as in training.
    """
    layout = context.plan.layout
    rows = whole_rows(layout)
    counted = torch.from_numpy(layout.is_counted)
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
        exchange = make_exchange(member) if case.plan(member.rank).exchanged_streams else None
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
        rows = whole_rows(context.plan.layout)
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
