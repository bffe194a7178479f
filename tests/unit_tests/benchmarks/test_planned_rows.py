# SPDX-License-Identifier: Apache-2.0
"""The report of the planner: published figures, what real collectives carry, and the time that planning takes."""

import pytest

from benchmarks.planned_rows import (
    EXCHANGES,
    MODELS,
    exchanged_bytes,
    last_rank_plan,
    plan_row,
    plan_rows,
)
from megatron_csbp.tools.attention_step import exchanged_by_layer
from megatron_csbp.transformer.geometry.scheme import Scheme
from megatron_csbp.transformer.geometry.visibility import CleanAttention

TOKEN_CAUSAL = CleanAttention.TOKEN_CAUSAL
CP, BP, CSBP = Scheme.CONTEXT_PARALLEL, Scheme.BLOCK_PARALLEL, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL


def test_nemotron_14b_at_256k_on_eight_ranks_moves_105_and_210_gib() -> None:
    moved = {
        scheme: plan_row("nemotron-14b", scheme, 262144, 8, 32, TOKEN_CAUSAL).remote_bytes / 2**30
        for scheme in (CSBP, CP, BP)
    }
    assert moved == {CSBP: 105.0, CP: 210.0, BP: 0.0}


def test_planning_a_million_tokens_on_64_ranks_takes_under_a_second() -> None:
    row = plan_row("nemotron-14b", CSBP, 2**20, 64, 32, TOKEN_CAUSAL)
    assert row.plan_seconds < 1.0
    assert row.rows == 2 * 2**20 // 64
    assert row.imbalance == row.executed_ratio == 1.0


@pytest.mark.parametrize("clean_attention", CleanAttention)
@pytest.mark.parametrize("scheme", [CP, BP, CSBP])
@pytest.mark.parametrize("model, length, group_size", [("nemotron-3b", 65536, 4), ("nemotron-14b", 2**20, 64)])
def test_the_exchange_starts_just_the_collectives_that_the_plan_says(
    model: str, length: int, group_size: int, scheme: Scheme, clean_attention: CleanAttention
) -> None:
    plan = last_rank_plan(scheme, length, group_size, 32, clean_attention)
    expected = EXCHANGES * exchanged_bytes(plan, MODELS[model])
    assert exchanged_by_layer(plan, MODELS[model]) == expected
    assert bool(expected) == (scheme is not BP)


def test_every_model_length_and_group_size_is_planned_under_every_scheme() -> None:
    rows = plan_rows(["nemotron-3b", "nemotron-8b"], [65536], [2, 64], 32, TOKEN_CAUSAL)
    assert [(row.model, row.group_size, row.scheme) for row in rows] == [
        (model, size, scheme)
        for model in ("nemotron-3b", "nemotron-8b")
        for size in (2, 64)
        for scheme in (CP, BP, CSBP)
    ]
    # Sharding the clean copy costs no operation, and halves the linear layers of two ranks at least.
    by_scheme = {row.scheme: row for row in rows if (row.model, row.group_size) == ("nemotron-8b", 64)}
    assert by_scheme[CP].attention_flops == by_scheme[CSBP].attention_flops < by_scheme[BP].attention_flops
    assert by_scheme[BP].linear_flops == 32.5 * by_scheme[CSBP].linear_flops
