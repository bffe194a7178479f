# SPDX-License-Identifier: Apache-2.0
"""The model of what a layer's tiles cost: its counts are the plan's, and its tables are those of the documentation."""

from pathlib import Path

import pytest

from megatron_csbp.reporting.attention_model import (
    BLOCK,
    H200,
    Heads,
    causal_seconds,
    tile_costs,
    tile_report,
)
from megatron_csbp.transformer.geometry.layer_plans import rank_rows
from megatron_csbp.transformer.geometry.plan import AttentionPlan, plan_attention
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import Scheme, Sharding
from megatron_csbp.transformer.geometry.tiles import KeySource, MaskKind, RowPattern, Tile
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask

HEADS = Heads(num_query_heads=32, num_key_value_heads=8, head_dim=128)
GPU_PAGE = Path(__file__).parents[3] / "docs" / "gpu.md"


def plan_of(length: int, rank: int = 7) -> AttentionPlan:
    rows = rank_rows(Sample(length, 32), Sharding(8, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL), rank)
    return plan_attention(rows, Mask(CleanAttention.TOKEN_CAUSAL))


@pytest.mark.parametrize("length", [2**15, 2**16])
@pytest.mark.parametrize("groups", [1, 4])
def test_operations_are_those_of_the_allowed_pairs_whatever_the_groups(length: int, groups: int) -> None:
    plan = plan_of(length)
    costs = tile_costs(plan, HEADS, groups)
    assert [cost.tile for cost in costs] == list(plan.tiles)
    products = plan.num_pairs * 2 * 128 * 32
    assert sum(cost.forward.operations for cost in costs) == 2 * products
    assert sum(cost.backward.operations for cost in costs) == 5 * products


def test_only_tiles_with_gathered_keys_are_launched_once_for_each_head_group() -> None:
    one, four = (tile_costs(plan_of(2**15), HEADS, groups) for groups in (1, 4))
    for alone, grouped in zip(one, four, strict=True):
        is_gathered = alone.tile.key_source is KeySource.GATHERED
        # A group's queries are a slice of all heads, of which a kernel gets a copy.
        assert grouped.backward.launches == (
            4 * (alone.backward.launches + 3) if is_gathered else alone.backward.launches
        )
        assert grouped.forward.launches == (
            4 * (alone.forward.launches + 1) if is_gathered else alone.forward.launches
        )


def test_a_large_tile_takes_the_time_of_its_operations_and_a_small_one_that_of_its_launches() -> None:
    *_, large = tile_costs(plan_of(2**18), HEADS)
    assert large.forward.seconds == pytest.approx(large.forward.operations / H200.forward, rel=0.02)
    assert large.backward.seconds == pytest.approx(large.backward.operations / H200.backward, rel=0.02)
    small = tile_costs(plan_of(2**9), HEADS)[0]
    assert small.forward.seconds == small.forward.launches * H200.launch_seconds


def test_blocks_of_rows_and_keys_are_computed_whole_and_folded_heads_fill_them() -> None:
    def seconds(rows: int, keys: int, mask: MaskKind) -> float:
        pattern = RowPattern(rows, repeats=((100_000, rows),))
        tile = Tile(pattern, RowPattern(keys, repeats=((100_000, keys),)), mask=mask)
        (cost,) = tile_costs(plan_with(tile), HEADS)
        return cost.forward.seconds - cost.forward.memory_bytes / H200.memory

    block = 2 * 2 * 128 * 100_000 * BLOCK * BLOCK / H200.forward
    assert seconds(32, 32, MaskKind.CAUSAL) == pytest.approx(32 * block)
    assert seconds(32, 32, MaskKind.FULL) == pytest.approx(8 * block)  # four query heads in one block of rows
    assert seconds(256, 256, MaskKind.CAUSAL) == pytest.approx(32 * 3 * block)
    assert seconds(256, 256, MaskKind.FULL) == pytest.approx(32 * 4 * block)


def plan_with(tile: Tile) -> AttentionPlan:
    plan = plan_of(2**9)
    object.__setattr__(plan, "local_tiles", (tile,))
    object.__setattr__(plan, "gathered_tiles", ())
    return plan


def test_the_yardstick_is_the_causal_call_with_as_many_pairs() -> None:
    forward, backward = causal_seconds(8192 * 8193 // 2, HEADS)
    assert forward == pytest.approx(2 * 2 * 128 * 32 * 8192**2 / 2 / H200.forward, rel=0.02)
    assert backward / forward == pytest.approx(5 / 2 * H200.forward / H200.backward)


@pytest.mark.parametrize("length", [2**15, 2**16, 2**18])
def test_the_documentation_has_these_tables(length: int) -> None:
    table = "\n".join(tile_report(length, 8, 32, CleanAttention.TOKEN_CAUSAL, HEADS))
    assert table in GPU_PAGE.read_text(), "python -m megatron_csbp.dry_run ... --tiles prints them"
