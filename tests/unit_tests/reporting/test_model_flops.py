# SPDX-License-Identifier: Apache-2.0
"""Megatron's FLOPs report of a block-diffusion step against the closed form."""

from argparse import Namespace

import pytest
from megatron.training import training

from megatron_csbp import megatron_reporting
from megatron_csbp.arguments import static_sample
from megatron_csbp.reporting.model_flops import ModelFlops
from megatron_csbp.tools.flops import ModelShape, training_flops
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask
from tests.support.megatron_arguments import parse

MODEL = (
    "--num-layers 3 --hidden-size 48 --num-attention-heads 4 --ffn-hidden-size 112 --kv-channels 16 --swiglu "
    "--group-query-attention --num-query-groups 2 --micro-batch-size 2 --diffusion-block-size 8 --seq-length 64 "
)
SHAPE = ModelShape(
    num_layers=3,
    hidden_size=48,
    ffn_hidden_size=112,
    num_query_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=192,
)
SAMPLE = Sample(64, 8)
CSBP = "--bp-size 2 --context-parallel-size 2"


def arguments(flags: str, clean_attention: CleanAttention) -> Namespace:
    """Return arguments as they are when a run starts: L in `clean_seq_length`, 2L in `seq_length`."""
    args, _ = parse(MODEL + flags)
    args.padded_vocab_size, args.clean_seq_length, args.seq_length = 192, 64, 128
    args.clean_attention = str(clean_attention)
    args.corrupted_views = 1
    return args


def reported(args: Namespace, loss_rows: dict[tuple[int, int], int], monkeypatch: pytest.MonkeyPatch) -> float:
    """Return what Megatron makes of one micro-batch, with the ranks (context, pipeline) one after the other."""
    flops = ModelFlops(args)
    for (_, stage), rows in loss_rows.items():
        last = stage == args.pipeline_model_parallel_size - 1
        monkeypatch.setattr(megatron_reporting, "is_counted_chunk", lambda model: True)
        monkeypatch.setattr(megatron_reporting, "computes_loss", lambda model, last=last: last)
        flops.count_micro_batch(None, static_sample(args), rows if last else 0)
    tokens, squares = training.consume_seqlen_stats_in_iteration()
    ranks = len(loss_rows)  # Megatron divides what all ranks have added up by the ranks of a replica
    result: float = training.num_floating_point_operations(
        args, 2, seqlen_squared_sum_in_batch=squares / ranks, total_real_tokens_in_batch=tokens / ranks
    )
    return result


@pytest.mark.parametrize("clean_attention", CleanAttention)
@pytest.mark.parametrize(
    "flags, loss_rows",
    [
        ("", {(0, 0): 77}),
        ("", {(0, 0): 1}),
        ("--bp-size 2 --context-parallel-size 2", {(0, 0): 30, (1, 0): 47}),
        (
            "--bp-size 2 --context-parallel-size 2 --pipeline-model-parallel-size 2",
            {(0, 0): 0, (0, 1): 250, (1, 0): 0, (1, 1): 3},
        ),
    ],
)
def test_megatron_reports_the_allowed_pairs_both_copies_rows_and_the_logits_of_loss_rows(
    flags: str, loss_rows: dict[tuple[int, int], int], clean_attention: CleanAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments(flags, clean_attention)
    expected = 2 * training_flops(SHAPE, SAMPLE, [Mask(clean_attention)], loss_rows=0)
    expected += sum(loss_rows.values()) * SHAPE.logit_flops_per_row
    assert reported(args, loss_rows, monkeypatch) == pytest.approx(expected, rel=1e-12)


def test_only_one_chunk_of_a_rank_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_reporting, "is_counted_chunk", lambda model: False)
    args = arguments("", CleanAttention.TOKEN_CAUSAL)
    ModelFlops(args).count_micro_batch(None, static_sample(args), 5)
    assert training.consume_seqlen_stats_in_iteration() == (None, None)


def test_the_start_summary_compares_with_the_stock_formula_which_counts_twice_the_pairs() -> None:
    flops = ModelFlops(arguments("--seq-length 64", CleanAttention.BLOCK_CAUSAL))
    counted, stock = flops.per_sequence()
    assert counted == pytest.approx(training_flops(SHAPE, SAMPLE, [Mask(CleanAttention.BLOCK_CAUSAL)], loss_rows=0))
    pairs_of_stock = (2 * 64) ** 2 / 2
    surplus = SHAPE.num_layers * (pairs_of_stock - flops.mean_pairs(SAMPLE)) * SHAPE.attention_flops_per_pair
    assert stock - counted == pytest.approx(surplus)
