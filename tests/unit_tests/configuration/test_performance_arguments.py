# SPDX-License-Identifier: Apache-2.0
"""Flags of speed and memory: their defaults from sizes."""

import pytest
import torch

from megatron_csbp.configuration.performance_arguments import (
    default_chunk_rows,
    exchange_bytes,
    fill_head_groups,
    fill_loss_chunk_rows,
    recomputes_attention,
    why_last_layer_is_whole,
)
from megatron_csbp.transformer.geometry.layer_plans import layer_plans
from megatron_csbp.transformer.geometry.plan import AttentionPlan
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import CopyKind, Scheme, Sharding
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask
from megatron_csbp.transformer.traffic_ledger import Collective
from tests.support.megatron_arguments import VALID, parse

NEMOTRON_14B = "--num-attention-heads 40 --group-query-attention --num-query-groups 8 --kv-channels 128"
CSBP, CP, BP = Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL, Scheme.CONTEXT_PARALLEL, Scheme.BLOCK_PARALLEL


def plan_of(length: int, scheme: Scheme = CSBP, window: int | None = None) -> AttentionPlan:
    return layer_plans(Sample(length, 32), Sharding(8, scheme), 0).plan(Mask(CleanAttention.TOKEN_CAUSAL, window))


@pytest.mark.parametrize(
    "flags, length, scheme, expected",
    [
        ("", 2**18, CSBP, 4),  # 1 GiB of keys and values
        ("--recompute-granularity full", 2**18, CSBP, 2),
        ("--recompute-granularity selective", 2**18, CSBP, 2),
        ("--recompute-granularity selective --recompute-modules mlp", 2**18, CSBP, 4),
        ("--tensor-model-parallel-size 8", 2**18, CSBP, 1),
        ("", 2**15, CSBP, 4),  # 128 MiB
        ("", 2**14, CSBP, 2),
        ("", 2**14, CP, 2),  # the baseline sends twice as much, in as many groups
        ("", 2**13, CSBP, 1),
        ("", 2**18, BP, 1),
        ("--csbp-head-groups 8", 2**13, CSBP, 8),
    ],
)
def test_head_groups_by_default_and_by_flag(flags: str, length: int, scheme: Scheme, expected: int) -> None:
    args, _ = parse(f"{VALID} {NEMOTRON_14B} {flags} --micro-batch-size 1")
    args.params_dtype = torch.bfloat16
    fill_head_groups(args, [plan_of(length, scheme)])
    assert args.csbp_head_groups == expected


def test_head_groups_follow_the_layer_that_gathers_most() -> None:
    args, _ = parse(f"{VALID} {NEMOTRON_14B} --micro-batch-size 1")
    args.params_dtype = torch.bfloat16
    fill_head_groups(args, [plan_of(2**18, window=1024)])
    assert args.csbp_head_groups == 1
    args.csbp_head_groups = None
    fill_head_groups(args, [plan_of(2**18, window=1024), plan_of(2**18)])
    assert args.csbp_head_groups == 4


@pytest.mark.parametrize("vocab_size, rows", [(131072, 1024), (131072 // 8, 8192), (100, 2**20), (10**7, 512)])
def test_a_chunk_of_the_loss_has_half_a_gibibyte_of_logits(vocab_size: int, rows: int) -> None:
    assert default_chunk_rows(vocab_size) == rows


@pytest.mark.parametrize("flags, rows", [("", 8192), ("--csbp-loss-chunk-rows 0", 0), ("--csbp-loss-chunk-rows 7", 7)])
def test_chunks_by_default_and_by_flag(flags: str, rows: int) -> None:
    args, _ = parse(f"{VALID} --tensor-model-parallel-size 8 {flags}")
    args.padded_vocab_size = 131072
    fill_loss_chunk_rows(args)
    assert args.csbp_loss_chunk_rows == rows


@pytest.mark.parametrize(
    "flags, factor", [("", 1), ("--csbp-grad-reduce-dtype bf16", 1), ("--csbp-grad-reduce-dtype fp32", 2)]
)
def test_bytes_of_a_reduce_scatter_follow_its_dtype(flags: str, factor: int) -> None:
    args, _ = parse(f"{VALID} {NEMOTRON_14B} {flags} --micro-batch-size 2")
    args.params_dtype = torch.bfloat16
    gather = exchange_bytes(args, plan_of(2**18), CopyKind.CLEAN)
    assert gather == 7 * 2**18 // 8 * 2 * 8 * 128 * 2 * 2
    assert exchange_bytes(args, plan_of(2**18), CopyKind.CLEAN, Collective.REDUCE_SCATTER) == factor * gather


def test_a_run_without_recomputation_does_not_recompute() -> None:
    assert not recomputes_attention(parse(VALID)[0])


@pytest.mark.parametrize(
    "flags, reason",
    [
        ("", None),
        ("--num-experts 4", "experts balance their load over both copies"),
        ("--attention-output-gate", "--attention-output-gate gates every row"),
        ("--tp-comm-overlap", "--tp-comm-overlap has buffers for all rows"),
        ("--fine-grained-activation-offloading", "--fine-grained-activation-offloading releases whole tensors"),
        ("--spec a b", "its layers come from --spec"),
        ("--sequence-parallel --tensor-model-parallel-size 2", None),
        (
            "--sequence-parallel --tensor-model-parallel-size 64",
            "--sequence-parallel cannot split the 32 corrupted rows of a rank",
        ),
    ],
)
def test_why_the_last_layer_is_whole(flags: str, reason: str | None) -> None:
    args, _ = parse(f"{VALID} {flags} --bp-size 2 --context-parallel-size 2")
    args.clean_seq_length, args.corrupted_views = args.seq_length, 1
    assert why_last_layer_is_whole(args, loss_on_clean_rows=False) == reason
    assert why_last_layer_is_whole(args, loss_on_clean_rows=True) == "the objective has a loss on the clean copy"
