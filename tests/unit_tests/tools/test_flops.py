# SPDX-License-Identifier: Apache-2.0
"""Operations against PyTorch's own counter, and the ranks' work against the mask itself, pair by pair."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from megatron_csbp.tools.flops import ModelShape, assignment_speedup, attention_work, training_flops
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import BlockAssignment, Scheme, Sharding
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask, all_rows, allowed_pairs, dense_mask

SHAPE = ModelShape(
    num_layers=3,
    hidden_size=8,
    ffn_hidden_size=24,
    num_query_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    vocab_size=50,
)
CSBP = Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL


TOKEN_CAUSAL = Mask(CleanAttention.TOKEN_CAUSAL)


def sample_of(group_size: int, blocks_per_chunk: int) -> Sample:
    return Sample(2 * group_size * blocks_per_chunk * 4, 4)


def counted(modules: list[nn.Module], rows: int) -> int:
    """Return what PyTorch counts for forward and backward of linear layers, each with inputs of `rows` rows."""
    with FlopCounterMode(display=False) as counter:
        for module in modules:
            assert isinstance(module, nn.Linear)
            module(torch.randn(rows, module.in_features, requires_grad=True)).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("gated", [True, False])
def test_linear_layers_cost_what_pytorch_counts(gated: bool) -> None:
    shape = replace(SHAPE, gated=gated)
    mlp = [nn.Linear(8, 24), nn.Linear(24, 8), *([nn.Linear(8, 24)] if gated else [])]
    layer = [nn.Linear(8, 24), nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(24, 8), *mlp]
    assert 7 * shape.layer_flops_per_row == counted(layer, rows=7)
    assert 7 * shape.logit_flops_per_row == counted([nn.Linear(8, 50)], rows=7)


def test_a_pair_costs_what_pytorch_counts_for_dense_attention() -> None:
    query, key, value = (torch.randn(4, rows, 6, requires_grad=True) for rows in (5, 9, 9))
    with FlopCounterMode(display=False) as counter:
        (query @ key.transpose(1, 2) @ value).sum().backward()
    assert 5 * 9 * SHAPE.attention_flops_per_pair == counter.get_total_flops()


def test_a_training_step_is_layers_pairs_and_logits() -> None:
    for clean_attention in CleanAttention:
        sample, mask = Sample(16, 4), Mask(clean_attention)
        pairs = int(dense_mask(sample, mask, all_rows(sample), all_rows(sample)).sum())
        expected = 3 * (32 * SHAPE.layer_flops_per_row + pairs * SHAPE.attention_flops_per_pair)
        expected += 11 * SHAPE.logit_flops_per_row
        assert training_flops(SHAPE, sample, [mask], loss_rows=11) == expected


@pytest.mark.parametrize("clean_attention", CleanAttention)
@pytest.mark.parametrize("assignment", BlockAssignment)
@pytest.mark.parametrize("scheme", [Scheme.CONTEXT_PARALLEL, CSBP])
def test_each_rank_computes_the_pairs_of_its_rows_in_the_mask(
    scheme: Scheme, assignment: BlockAssignment, clean_attention: CleanAttention
) -> None:
    sample, sharding, mask = sample_of(3, 5), Sharding(3, scheme, assignment), Mask(clean_attention)
    ranks = [RankRows(sample, sharding, rank) for rank in range(3)]
    expected = tuple(
        int(dense_mask(sample, mask, (rows.sample_positions, rows.copies), all_rows(sample)).sum()) for rows in ranks
    )
    assert attention_work(sample, sharding, mask).pairs == expected


@pytest.mark.parametrize("group_size, blocks_per_chunk", list(product([2, 4, 64], [4, 5, 32])))
def test_sharded_schemes_waste_nothing_and_dual_end_is_even(group_size: int, blocks_per_chunk: int) -> None:
    for scheme, clean_attention in product([Scheme.CONTEXT_PARALLEL, CSBP], CleanAttention):
        sample, sharding = sample_of(group_size, blocks_per_chunk), Sharding(group_size, scheme)
        work = attention_work(sample, sharding, Mask(clean_attention))
        assert work.executed_ratio == 1.0
        assert work.imbalance == 1.0


def test_contiguous_assignment_is_uneven_and_slower() -> None:
    for group_size in (2, 8, 64):
        sample, sharding = sample_of(group_size, 16), Sharding(group_size, CSBP, BlockAssignment.CONTIGUOUS)
        contiguous = attention_work(sample, sharding, TOKEN_CAUSAL)
        assert contiguous.executed_ratio == 1.0
        assert contiguous.imbalance > 1.4 * group_size
        speedup = assignment_speedup(sample, sharding, TOKEN_CAUSAL)
        assert speedup == pytest.approx(max(contiguous.pairs) * group_size / sum(contiguous.pairs))
        assert 1.4 < speedup < 2


def test_pure_bp_repeats_the_clean_copy_on_every_rank() -> None:
    sample = sample_of(4, 8)
    work = attention_work(sample, Sharding(4, Scheme.BLOCK_PARALLEL), TOKEN_CAUSAL)
    assert work.allowed == allowed_pairs(sample, TOKEN_CAUSAL)
    assert sum(work.pairs) - work.allowed == 3 * sample.length * (sample.length + 1) // 2


def test_views_windows_and_active_blocks_cost_their_own_rows_and_pairs() -> None:
    active = np.zeros((2, 4), dtype=bool)
    active[0, 1:3] = active[1, 3] = True
    sample = Sample(16, 4, 2, active=active)
    windows = [TOKEN_CAUSAL, Mask(CleanAttention.TOKEN_CAUSAL, 3), Mask(CleanAttention.TOKEN_CAUSAL, 3)]
    pairs = sum(int(dense_mask(sample, mask, all_rows(sample), all_rows(sample)).sum()) for mask in windows)
    expected = 3 * (16 + 3 * 4) * SHAPE.layer_flops_per_row + pairs * SHAPE.attention_flops_per_pair
    assert training_flops(SHAPE, sample, windows, loss_rows=0) == expected
