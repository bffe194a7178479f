# SPDX-License-Identifier: Apache-2.0
"""What a step of published models would hold, move and compute at cluster sizes, from the plans that training uses.

Units: bytes and operations of one rank, for one training step of one sequence (forward, backward, all layers).
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megatron_csbp.tools.flops import ModelShape, assignment_speedup, attention_work
from megatron_csbp.transformer.geometry.layer_plans import rank_rows
from megatron_csbp.transformer.geometry.plan import AttentionPlan, plan_attention
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import Scheme, Sharding
from megatron_csbp.transformer.geometry.transfers import row_bytes
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask

_NEMOTRON = ModelShape(
    num_layers=26,
    hidden_size=3072,
    ffn_hidden_size=9216,
    num_query_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=131072,
)
MODELS = {
    "nemotron-3b": _NEMOTRON,
    "nemotron-8b": replace(_NEMOTRON, num_layers=34, hidden_size=4096, ffn_hidden_size=14336),
    "nemotron-14b": replace(_NEMOTRON, num_layers=40, hidden_size=5120, ffn_hidden_size=16384),
}
"""Nemotron Labs Diffusion, as published."""
EXCHANGES = 3
"""Times that a layer exchanges a copy in a training step: K/V in forward and again in backward, and dK/dV."""
_BF16_BYTES = 2
_SCHEMES = (Scheme.CONTEXT_PARALLEL, Scheme.BLOCK_PARALLEL, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL)


@dataclass(frozen=True)
class PlanRow:
    """One line.

    Attributes:
        model: name in `MODELS`.
        sequence_length: L, clean tokens.
        group_size: P, ranks of the context group.
        scheme: CP, BP or CSBP.
        rows: rows of both copies on a rank.
        remote_bytes: keys, values and their gradients from other ranks, the same on every rank.
        attention_flops: operations of the attention on the busiest rank.
        linear_flops: operations of the layers' linear parts on a rank.
        imbalance: attention of the busiest rank over that of the least busy one.
        executed_ratio: pairs that all ranks compute over pairs that the mask allows.
        dual_end_speedup: busiest rank's attention under contiguous over that under dual-end assignment; modelled.
        plan_seconds: time that planning took for the last rank.
    """

    model: str
    sequence_length: int
    group_size: int
    scheme: Scheme
    rows: int
    remote_bytes: int
    attention_flops: int
    linear_flops: int
    imbalance: float
    executed_ratio: float
    dual_end_speedup: float
    plan_seconds: float


def plan_row(
    model: str, scheme: Scheme, sequence_length: int, group_size: int, block_size: int, clean_attention: CleanAttention
) -> PlanRow:
    """Plan one training step of one sequence.

    Args:
        model: name in `MODELS`.
        scheme: CP, BP or CSBP.
        sequence_length: L, clean tokens.
        group_size: P, at least 2.
        block_size: M.
        clean_attention: mask of the clean copy.

    Raises:
        ValueError: the length does not divide.
    """
    shape = MODELS[model]
    started = time.perf_counter()
    plan = last_rank_plan(scheme, sequence_length, group_size, block_size, clean_attention)
    assert plan.num_pairs, "every rank computes something"
    plan_seconds = time.perf_counter() - started
    sample, sharding = plan.rows.sample, plan.rows.sharding
    work = attention_work(sample, sharding, plan.mask)
    return PlanRow(
        model=model,
        sequence_length=sequence_length,
        group_size=group_size,
        scheme=scheme,
        rows=plan.rows.num_rows,
        remote_bytes=shape.num_layers * EXCHANGES * exchanged_bytes(plan, shape),
        attention_flops=shape.num_layers * max(work.pairs) * shape.attention_flops_per_pair,
        linear_flops=shape.num_layers * plan.rows.num_rows * shape.layer_flops_per_row,
        imbalance=work.imbalance,
        executed_ratio=work.executed_ratio,
        dual_end_speedup=assignment_speedup(sample, sharding, plan.mask),
        plan_seconds=plan_seconds,
    )


def last_rank_plan(
    scheme: Scheme, sequence_length: int, group_size: int, block_size: int, clean_attention: CleanAttention
) -> AttentionPlan:
    """Return the plan of the last rank, made anew; see `plan_row`."""
    sample, sharding = Sample(sequence_length, block_size), Sharding(group_size, scheme)
    return plan_attention(rank_rows(sample, sharding, group_size - 1), Mask(clean_attention))


def exchanged_bytes(plan: AttentionPlan, shape: ModelShape, itemsize: int = _BF16_BYTES) -> int:
    """Return the bytes from other ranks of one exchange of every copy that the plan exchanges, in one layer."""
    per_row = row_bytes(shape.num_key_value_heads, shape.head_dim, itemsize)
    return sum(transfer.gather_bytes(per_row) for _, transfer in plan.transfers)


def plan_rows(
    models: Iterable[str],
    lengths: Sequence[int],
    group_sizes: Sequence[int],
    block_size: int,
    clean_attention: CleanAttention,
) -> list[PlanRow]:
    """Plan every model, length and group size under every scheme; see `plan_row`."""
    return [
        plan_row(model, scheme, length, group_size, block_size, clean_attention)
        for model in models
        for length in lengths
        for group_size in group_sizes
        for scheme in _SCHEMES
    ]
