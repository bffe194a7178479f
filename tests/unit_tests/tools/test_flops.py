# SPDX-License-Identifier: Apache-2.0
"""Operations against PyTorch's own counter, and the ranks' work against the mask itself, pair by pair."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from megatron_csbp.transformer.attention_plan import CleanAttention, allowed_pairs
from megatron_csbp.transformer.layout import BlockAssignment, Scheme, SequenceLayout
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from megatron_csbp.tools.flops import ModelShape, assignment_speedup, attention_work, training_flops
from tests.support.dense_oracle import allowed_mask, whole_rows

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


def layout_of(group_size: int, blocks_per_chunk: int, scheme: Scheme = CSBP, block_size: int = 4) -> SequenceLayout:
    return SequenceLayout(
        sequence_length=2 * group_size * blocks_per_chunk * block_size,
        block_size=block_size,
        group_size=group_size,
        scheme=scheme,
    )


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
        pairs = int(allowed_mask(16, 4, clean_attention).sum())
        expected = 3 * (32 * SHAPE.layer_flops_per_row + pairs * SHAPE.attention_flops_per_pair)
        expected += 11 * SHAPE.logit_flops_per_row
        assert training_flops(SHAPE, 16, 4, clean_attention, loss_rows=11) == expected


@pytest.mark.parametrize("clean_attention", CleanAttention)
@pytest.mark.parametrize("assignment", BlockAssignment)
@pytest.mark.parametrize("scheme", [Scheme.CONTEXT_PARALLEL, CSBP])
def test_each_rank_computes_the_pairs_of_its_rows_in_the_mask(
    scheme: Scheme, assignment: BlockAssignment, clean_attention: CleanAttention
) -> None:
    layout = replace(layout_of(3, 5, scheme), assignment=assignment)
    mask = allowed_mask(layout.sequence_length, layout.block_size, clean_attention)
    expected = tuple(int(mask[whole_rows(replace(layout, rank=rank))].sum()) for rank in range(3))
    assert attention_work(layout, clean_attention).pairs == expected


@pytest.mark.parametrize("group_size, blocks_per_chunk", list(product([2, 4, 64], [4, 5, 32])))
def test_sharded_schemes_waste_nothing_and_dual_end_is_even(group_size: int, blocks_per_chunk: int) -> None:
    for scheme, clean_attention in product([Scheme.CONTEXT_PARALLEL, CSBP], CleanAttention):
        work = attention_work(layout_of(group_size, blocks_per_chunk, scheme), clean_attention)
        assert work.executed_ratio == 1.0
        assert work.imbalance == 1.0


def test_contiguous_assignment_is_uneven_and_slower() -> None:
    for group_size in (2, 8, 64):
        layout = layout_of(group_size, 16)
        contiguous = attention_work(
            replace(layout, assignment=BlockAssignment.CONTIGUOUS), CleanAttention.TOKEN_CAUSAL
        )
        assert contiguous.executed_ratio == 1.0
        assert contiguous.imbalance > 1.4 * group_size
        speedup = assignment_speedup(layout, CleanAttention.TOKEN_CAUSAL)
        assert speedup == pytest.approx(max(contiguous.pairs) * group_size / sum(contiguous.pairs))
        assert 1.4 < speedup < 2


def test_pure_bp_repeats_the_clean_copy_on_every_rank() -> None:
    layout = layout_of(4, 8, Scheme.BLOCK_PARALLEL)
    length = layout.sequence_length
    work = attention_work(layout, CleanAttention.TOKEN_CAUSAL)
    assert work.allowed == allowed_pairs(length, 4, CleanAttention.TOKEN_CAUSAL)
    assert sum(work.pairs) - work.allowed == 3 * length * (length + 1) // 2
