# SPDX-License-Identifier: Apache-2.0
"""Corrupted rows on their own: taken out, put back, and attended with alone."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_csbp.transformer.corrupted_rows import among_all_rows, corrupted_rows
from megatron_csbp.transformer.geometry.plan import plan_attention
from megatron_csbp.transformer.geometry.scheme import Scheme
from megatron_csbp.transformer.geometry.visibility import CleanAttention
from megatron_csbp.transformer.kernels.reference import ReferenceKernel
from tests.support.attention_cases import DISTRIBUTED_SCHEMES, Attend, Case, gradients_on_group
from tests.support.simulated_group import SimulatedCollectives

TOPOLOGIES = [(Scheme.SINGLE, 1), *((scheme, 2) for scheme in DISTRIBUTED_SCHEMES)]


@pytest.mark.parametrize("views, active", [(1, None), (2, None), (1, ((0, 2),))])
@pytest.mark.parametrize("scheme, group_size", TOPOLOGIES)
def test_rows_come_back_to_their_places_with_zeros_between(
    scheme: Scheme, group_size: int, views: int, active: tuple[tuple[int, ...], ...] | None
) -> None:
    for rank in range(group_size):
        of_rank = Case(scheme=scheme, group_size=group_size, num_views=views, active=active).rows(rank)
        rows = torch.randn(of_rank.num_rows, 3)
        is_corrupted = torch.from_numpy(of_rank.is_corrupted)
        taken = corrupted_rows(rows, of_rank)
        if is_corrupted.any():  # of few active blocks, another rank may hold all
            assert torch.equal(taken, rows[is_corrupted])
        assert torch.equal(among_all_rows(taken, of_rank), rows * is_corrupted[:, None])


@pytest.mark.parametrize("scheme, group_size", TOPOLOGIES)
def test_a_rank_without_corrupted_rows_takes_a_block_that_leaves_no_trace(scheme: Scheme, group_size: int) -> None:
    """Megatron's layers take no tensors without rows."""
    for rank in range(group_size):
        case = Case(scheme=scheme, group_size=group_size, active=((),))
        of_rank = case.rows(rank)
        rows = torch.randn(of_rank.num_rows, 3, requires_grad=True)
        taken = corrupted_rows(rows, of_rank)
        assert len(taken) == of_rank.sample.block_size
        back = among_all_rows(taken, of_rank)
        assert torch.equal(back, torch.zeros(of_rank.num_rows, 3))
        (gradient,) = torch.autograd.grad(back.sum(), rows)
        assert not gradient.any()


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("clean_attention", CleanAttention)
@pytest.mark.parametrize("scheme, group_size", TOPOLOGIES)
def test_corrupted_queries_alone_attend_as_among_clean_ones_and_leave_the_same_gradients(
    scheme: Scheme,
    group_size: int,
    clean_attention: CleanAttention,
    groups: int,
    simulated_collectives: SimulatedCollectives,
) -> None:
    case = Case(
        scheme=scheme,
        group_size=group_size,
        clean_attention=clean_attention,
        num_query_heads=4,
        num_key_value_heads=2,
        micro_batch_size=2,
    )
    rows = case.rows(0)  # corrupted and clean rows are at the same places on every rank

    def only_corrupted(attend: Attend) -> Attend:
        return lambda *inputs: among_all_rows(corrupted_rows(attend(*inputs), rows), rows)

    expected, _ = gradients_on_group(case, only_corrupted)
    for kernel in (None, ReferenceKernel()):
        got, _ = gradients_on_group(
            case,
            only_corrupted,
            lambda context, kernel=kernel: replace(
                context,
                plan=plan_attention(context.plan.rows, context.plan.mask, clean_queries=False),
                kernel=kernel or context.kernel,
                num_head_groups=groups,
            ),
        )
        assert max(difference(a, b) for a, b in zip(got, expected, strict=True)) < 1e-12


def difference(found: Tensor, expected: Tensor) -> float:
    return (found - expected).abs().max().item()
