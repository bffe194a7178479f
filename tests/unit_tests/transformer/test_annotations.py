# SPDX-License-Identifier: Apache-2.0
"""Ranges are there under a profiler, and cost nothing without one."""

import pytest
import torch
from megatron_csbp.transformer.attention_plan import AttentionPlan, CleanAttention
from megatron_csbp.transformer.layout import Scheme, SequenceLayout
from torch.profiler import ProfilerActivity, profile

from megatron_csbp.tools.attention_step import attention_step, fake_group
from megatron_csbp.tools.flops import ModelShape
from megatron_csbp.transformer import annotations

SHAPE = ModelShape(
    num_layers=1, hidden_size=8, ffn_hidden_size=8, num_query_heads=2, num_key_value_heads=1, head_dim=8, vocab_size=8
)
KINDS = ("prefix", "clean diagonal", "corrupted diagonal", "staircase")


def run_layer() -> None:
    layout = SequenceLayout(
        sequence_length=64, block_size=4, group_size=2, rank=1, scheme=Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL
    )
    with fake_group(2, 1) as group:
        attention_step(
            AttentionPlan(layout, CleanAttention.TOKEN_CAUSAL), SHAPE, group, device="cpu", dtype=torch.float32
        )()


def test_exchange_every_tile_kind_and_merge_are_ranges_of_a_profile() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        run_layer()
    names = {event.key for event in recorded.key_averages() if event.key.startswith("csbp/")}
    tiles = {f"csbp/{action}/{kind}" for action in ("forward", "merge", "backward", "add gradients") for kind in KINDS}
    assert names == tiles | {f"csbp/{action}/{what}" for action in ("start", "wait") for what in ("gather", "scatter")}


def test_without_a_profiler_there_are_no_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr(annotations.profiler, "record_function", refuse)
    run_layer()
    with annotations.annotate("forward", "prefix") as nothing:
        assert nothing is None
