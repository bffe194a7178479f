# SPDX-License-Identifier: Apache-2.0
"""Megatron's seat of core attention: what it refuses, and that it attends with the plan of the call."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_csbp.tools.attention_step import fake_group
from megatron_csbp.transformer.attention import block_diffusion_attention
from megatron_csbp.transformer.core_attention import BlockDiffusionSettings, CSBPCoreAttention
from megatron_csbp.transformer.corrupted_rows import corrupted_rows
from megatron_csbp.transformer.geometry.layer_plans import layer_plans
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import Scheme, Sharding
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask, WindowAnchor
from megatron_csbp.transformer.query_scale import QueryScale
from megatron_csbp.transformer.sample_params import plans_of, sample_params
from megatron_csbp.transformer.traffic_ledger import TrafficLedger
from megatron_csbp.transformer.wait_clock import HostClock
from tests.support.attention_cases import Case

TOKEN = CleanAttention.TOKEN_CAUSAL
SETTINGS = BlockDiffusionSettings(sample=Sample(24, 4), sharding=Sharding(), clean_attention=TOKEN)
SINGLE = Case(scheme=Scheme.SINGLE, group_size=1, blocks_per_chunk=6, num_query_heads=4, num_key_value_heads=2)


@pytest.fixture
def group() -> Iterator[Any]:
    with fake_group(1, 0) as group:
        yield SimpleNamespace(cp=group)


def config(**changes: Any) -> TransformerConfig:
    options = {
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "kv_channels": 8,
        "attention_dropout": 0.0,
    }
    return TransformerConfig(**(options | changes))


def attention(group: Any, **changes: Any) -> CSBPCoreAttention:
    options: dict[str, Any] = {
        "config": config(),
        "layer_number": 1,
        "attn_mask_type": AttnMaskType.causal,
        "attention_type": "self",
        "pg_collection": group,
        "settings": SETTINGS,
    }
    return CSBPCoreAttention(**(options | changes))


def inputs(rows: int = 48) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, 1, heads, 8, generator=generator) for heads in (4, 2, 2)]


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"attention_type": "cross"}, "self attention without dropout, not cross, 0.0"),
        ({"attention_dropout": 0.1}, "self attention without dropout, not self, 0.1"),
        ({"config": config(attention_dropout=0.2)}, "self attention without dropout, not self, 0.2"),
    ],
)
def test_cross_attention_and_dropout_are_refused(group: Any, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"block-diffusion attention does {said}"):
        attention(group, **changes)


def test_without_process_groups_it_is_refused() -> None:
    with pytest.raises(ValueError, match="CSBPCoreAttention needs pg_collection with the context group `cp`"):
        attention(None)


@pytest.mark.parametrize("name, position", [("mask", 3), ("bias", 5)])
def test_masks_and_biases_are_refused(group: Any, name: str, position: int) -> None:
    arguments: list[Any] = [*inputs(), None, None, None]
    arguments[position] = torch.zeros(1)
    with pytest.raises(ValueError, match=f"takes no attention {name}; its plan says who sees whom"):
        attention(group)(*arguments)


def test_packed_sequences_of_megatrons_own_are_refused(group: Any) -> None:
    with pytest.raises(ValueError, match="takes no packed sequences of Megatron's own; documents are in its plan"):
        attention(group)(*inputs(), None, packed_seq_params=PackedSeqParams(qkv_format="thd"))


@pytest.mark.parametrize("rows", [47, 49])
def test_other_rows_than_the_plans_are_refused_with_the_flags_that_say_how_many(group: Any, rows: int) -> None:
    with pytest.raises(ValueError, match=f"block-diffusion attention got {rows} rows; --seq-length, ") as error:
        attention(group)(*inputs(rows), None)
    assert "--diffusion-block-size" in str(error.value)
    assert "--corrupted-views" in str(error.value)
    assert str(error.value).endswith("give this rank 48.")


def expected(sample: Sample, mask: Mask, given: list[torch.Tensor], scale: float = 8**-0.5) -> torch.Tensor:
    plan = layer_plans(sample, Sharding(), 0).plan(mask)
    context = replace(SINGLE.context(0, None), plan=plan, scale=scale)
    return block_diffusion_attention(given[0], given[1], given[2], context).flatten(2)


def test_it_attends_with_the_settings_sample(group: Any) -> None:
    assert torch.equal(attention(group)(*inputs(), None), expected(SETTINGS.sample, Mask(TOKEN), inputs()))


def test_the_scale_may_be_given(group: Any) -> None:
    got = attention(group, softmax_scale=0.5)(*inputs(), None)
    assert torch.equal(got, expected(SETTINGS.sample, Mask(TOKEN), inputs(), 0.5))


def test_a_call_may_carry_a_sample_of_its_own(group: Any) -> None:
    sample = Sample(24, 4, documents=np.array([(0, 11), (12, 24)]))
    params = sample_params(layer_plans(sample, Sharding(), 0))
    got = attention(group)(*inputs(), None, packed_seq_params=params)
    assert torch.equal(got, expected(sample, Mask(TOKEN), inputs()))
    assert not torch.equal(got, expected(SETTINGS.sample, Mask(TOKEN), inputs()))


def test_the_plans_of_a_call_are_those_that_were_put_in() -> None:
    plans = layer_plans(SETTINGS.sample, Sharding(), 0)
    params = sample_params(plans)
    assert plans_of(params) is plans
    assert plans_of(None) is None
    assert (params.qkv_format, params.max_seqlen_q, params.max_seqlen_kv) == ("sbhd", 48, 48)


def test_windows_are_those_of_megatrons_flags(group: Any) -> None:
    windows = config(window_size=(5, 0), window_attn_skip_freq=2)
    anchored = replace(SETTINGS, window_anchor=WindowAnchor.BLOCK)
    masks = [anchored.mask(windows, number) for number in range(1, 5)]
    window, full = Mask(TOKEN, 6, WindowAnchor.BLOCK), Mask(TOKEN, None, WindowAnchor.BLOCK)
    assert masks == [window, full, window, full]
    got = attention(group, settings=anchored, config=windows, layer_number=3)(*inputs(), None)
    assert torch.equal(got, expected(SETTINGS.sample, window, inputs()))


def test_dropped_clean_rows_leave_the_corrupted_ones_in_training_only(group: Any) -> None:
    layer = attention(group, drops_clean_rows=True)
    whole = expected(SETTINGS.sample, Mask(TOKEN), inputs())
    rows = layer_plans(SETTINGS.sample, Sharding(), 0).rows
    torch.testing.assert_close(layer(*inputs(), None), corrupted_rows(whole, rows))
    assert torch.equal(layer.eval()(*inputs(), None), whole)


def test_queries_are_scaled_by_the_position_in_their_document(group: Any) -> None:
    scale = QueryScale(0.5, 4)
    sample = Sample(24, 4, documents=np.array([(0, 12), (12, 24)]))
    plans = layer_plans(sample, Sharding(), 0)
    layer = attention(group, settings=replace(SETTINGS, query_scale=scale))
    got = layer(*inputs(), None, packed_seq_params=sample_params(plans))
    query, key, value = inputs()
    factors = 1 + 0.5 * torch.log1p((torch.from_numpy(plans.rows.positions) // 4).float())
    assert torch.equal(got, expected(sample, Mask(TOKEN), [query * factors[:, None, None, None], key, value]))


def test_every_exchange_is_entered_for_the_layer_while_it_is_observed() -> None:
    ledger = TrafficLedger()
    sharding = Sharding(2, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL)
    settings = replace(SETTINGS, sample=Sample(32, 4), sharding=sharding)
    with fake_group(2, 1) as two:
        layer = attention(SimpleNamespace(cp=two), settings=settings, layer_number=3)
        given = inputs(layer.plan().rows.num_rows)
        layer.observe(ledger, clock := HostClock())
        layer(*given, None)
        assert {entry.layer for entry in ledger.take()} == {3}
        assert clock.take_seconds() > 0
        layer.observe(None, None)
        layer(*given, None)
    assert not ledger.take()
    assert clock.take_seconds() == 0


def test_without_an_exchange_there_is_nothing_to_observe(group: Any) -> None:
    attention(group).observe(TrafficLedger(), HostClock())


def test_layers_are_numbered_from_1(group: Any) -> None:
    assert attention(group, layer_number=0).layer_number == 1
    assert attention(group, layer_number=4).layer_number == 4
