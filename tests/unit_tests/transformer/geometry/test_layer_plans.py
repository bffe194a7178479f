# SPDX-License-Identifier: Apache-2.0
"""Plans of a sample: made once for each mask, shared by equal samples, blocks spread where they are few."""

import numpy as np
import pytest

from megatron_csbp.transformer.geometry import layer_plans as module
from megatron_csbp.transformer.geometry.layer_plans import LayerPlans, layer_plans, rank_rows
from megatron_csbp.transformer.geometry.plan import AttentionPlan, plan_attention
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import Scheme, Sharding
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask
from tests.support.geometry_cases import SCHEMES

FULL, WINDOW = Mask(CleanAttention.TOKEN_CAUSAL), Mask(CleanAttention.TOKEN_CAUSAL, 5)
SHARDING = Sharding(2, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Mask, bool]]:
    """What is planned, in order."""
    planned = []

    def plan(rows: object, mask: Mask, *, clean_queries: bool) -> AttentionPlan:
        planned.append((mask, clean_queries))
        return plan_attention(rows, mask, clean_queries=clean_queries)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "plan_attention", plan)
    return planned


def test_a_plan_is_made_once_for_each_mask(planned: list[tuple[Mask, bool]]) -> None:
    plans = LayerPlans(rank_rows(Sample(16, 2), SHARDING, 0))
    assert plans.plan(FULL) is plans.plan(Mask(CleanAttention.TOKEN_CAUSAL))
    assert plans.plan(WINDOW).mask is WINDOW
    assert not plans.plan(FULL, clean_queries=False).clean_queries
    assert planned == [(FULL, True), (WINDOW, True), (FULL, False)]
    assert plans.plan(FULL).rows is plans.rows


def test_plans_that_are_prepared_are_there_when_asked_for(planned: list[tuple[Mask, bool]]) -> None:
    plans = LayerPlans(rank_rows(Sample(16, 2), SHARDING, 0))
    assert plans.prepare([(FULL, True), (WINDOW, False)]) is plans
    assert planned == [(FULL, True), (WINDOW, False)]
    plans.plan(FULL)
    plans.plan(WINDOW, clean_queries=False)
    assert len(planned) == 2


def test_equal_samples_share_their_plans_and_others_do_not() -> None:
    documents = np.array([(0, 8), (8, 15)])
    mine = layer_plans(Sample(16, 2, documents=documents), SHARDING, 1)
    assert layer_plans(Sample(16, 2, documents=documents.copy()), SHARDING, 1) is mine
    assert layer_plans(Sample(16, 2, documents=np.array([(0, 8), (8, 16)])), SHARDING, 1) is not mine
    assert layer_plans(Sample(16, 2, documents=documents), SHARDING, 0) is not mine
    bp = Sharding(2, Scheme.BLOCK_PARALLEL)
    assert layer_plans(Sample(16, 2, documents=documents), bp, 1) is not mine
    assert mine.rows.rank == 1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_chosen_blocks_are_spread_evenly_but_in_the_cp_baseline(scheme: Scheme) -> None:
    active = np.zeros((1, 8), dtype=bool)
    active[0, :2] = True
    sample = Sample(16, 2, active=active)
    rows = [rank_rows(sample, Sharding(2, scheme), rank).num_corrupted_rows for rank in range(2)]
    assert rows == ([4, 0] if scheme is Scheme.CONTEXT_PARALLEL else [2, 2])
    assert rank_rows(Sample(16, 2), Sharding(2, scheme), 0).block_owners is None
    assert rank_rows(sample, Sharding(), 0).block_owners is None
