# SPDX-License-Identifier: Apache-2.0
"""Ranges are there under a profiler, and cost nothing without one."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron_csbp.tools.attention_step import attention_step, fake_group
from megatron_csbp.tools.flops import ModelShape
from megatron_csbp.transformer import annotations
from megatron_csbp.transformer.geometry.scheme import Scheme
from tests.support.attention_cases import Case

SHAPE = ModelShape(
    num_layers=1, hidden_size=8, ffn_hidden_size=8, num_query_heads=2, num_key_value_heads=1, head_dim=8, vocab_size=8
)
KINDS = ("local full", "local causal", "gathered full")


def run_layer() -> None:
    plan = Case(scheme=Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL, group_size=2).plan(1)
    with fake_group(2, 1) as group:
        attention_step(plan, SHAPE, group, device="cpu", dtype=torch.float32)()


def test_exchange_every_tile_kind_and_merge_are_ranges_of_a_profile() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        run_layer()
    names = {event.key for event in recorded.key_averages() if event.key.startswith("csbp/")}
    tiles = {f"csbp/{action}/{kind}" for action in ("forward", "merge", "backward", "add gradients") for kind in KINDS}
    assert names == tiles | {f"csbp/{action}/{what}" for action in ("start", "wait") for what in ("gather", "reduce")}


def test_without_a_profiler_there_are_no_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr(annotations.profiler, "record_function", refuse)
    run_layer()
    with annotations.annotate("forward", "local full") as nothing:
        assert nothing is None
