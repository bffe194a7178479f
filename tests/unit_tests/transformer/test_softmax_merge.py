# SPDX-License-Identifier: Apache-2.0
"""The algebra of the merge: it is the softmax over the union of key sets."""

from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_csbp.transformer.softmax_merge import accumulation_dtype, merge_partial

NUM_ROWS, NUM_HEADS, HEAD_DIM = 3, 2, 4


def partial(num_keys: int, seed: int, spread: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores and values over some keys, and their attention output and log-sum-exp; no key gives 0 and -inf."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(NUM_ROWS, NUM_HEADS, num_keys, dtype=torch.float64, generator=generator) * spread
    values = torch.randn(num_keys, NUM_HEADS, HEAD_DIM, dtype=torch.float64, generator=generator)
    return scores, values, *attend(scores, values)


def attend(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    weights = scores.softmax(-1) if scores.shape[-1] else scores
    return torch.einsum("rnk,knd->rnd", weights, values), scores.logsumexp(-1)


def merged(partials: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    out, lse = partials[0][0].clone(), partials[0][1].clone()
    for other_out, other_lse in partials[1:]:
        merge_partial(out, lse, other_out, other_lse)
    return out, lse


@settings(max_examples=40)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any), st.sampled_from([0.1, 1.0, 50.0, 700.0]))
def test_merging_is_softmax_over_the_union_in_any_order(sizes: list[int], spread: float) -> None:
    parts = [partial(size, seed, spread) for seed, size in enumerate(sizes)]
    expected = attend(torch.cat([p[0] for p in parts], -1), torch.cat([p[1] for p in parts]))
    for order in permutations(parts):
        torch.testing.assert_close(merged([p[2:] for p in order]), expected, atol=1e-12, rtol=1e-12)


def test_merging_is_associative() -> None:
    first, second, third = (partial(size, size)[2:] for size in (2, 3, 4))
    torch.testing.assert_close(
        merged([merged([first, second]), third]), merged([first, merged([second, third])]), atol=1e-14, rtol=1e-14
    )


def test_a_side_without_keys_changes_nothing_bit_for_bit() -> None:
    some, none = partial(4, 1)[2:], partial(0, 2)[2:]
    assert torch.equal(none[1], torch.full_like(none[1], -torch.inf))
    for pair in ([some, none], [none, some]):
        out, lse = merged(pair)
        assert torch.equal(out, some[0])
        assert torch.equal(lse, some[1])


def test_no_keys_on_either_side_leave_the_row_as_it_is() -> None:
    out, lse = merged([partial(0, 1)[2:], partial(0, 2)[2:]])
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("where", ["out", "lse"])
def test_nan_is_not_hidden(side: int, where: str) -> None:
    pair = [[t.clone() for t in partial(3, seed)[2:]] for seed in (1, 2)]
    pair[side][("out", "lse").index(where)][0, 0] = torch.nan
    out, _ = merged([(out, lse) for out, lse in pair])
    assert out[0, 0].isnan().all()
    assert not out[1:].isnan().any()


def test_scores_far_beyond_the_range_of_exp_do_not_overflow() -> None:
    out = torch.tensor([[[1.0]], [[2.0]]])
    lse = torch.tensor([[-3000.0], [3000.0]])
    merge_partial(out, lse, torch.tensor([[[5.0]], [[7.0]]]), torch.tensor([[3000.0], [-3000.0]]))
    assert out.flatten().tolist() == [5.0, 2.0]
    assert lse.flatten().tolist() == [3000.0, 3000.0]


def test_bf16_partials_are_accumulated_in_fp32() -> None:
    # 256 equal key sets: each merge moves the average by less than bf16 resolves, so a bf16 sum would stand still.
    partial_out = torch.cat([torch.zeros(1, 1, 1), torch.ones(1, 1, 1)]).to(torch.bfloat16)
    out, lse = torch.zeros(1, 1, 1), torch.zeros(1, 1)
    for index in range(1, 2049):
        merge_partial(out, lse, partial_out[index % 2], torch.zeros(1, 1))
    assert out.dtype == lse.dtype == torch.float32
    assert abs(out.item() - 1024 / 2049) < 1e-5
    assert abs(lse.item() - torch.tensor(2049.0).log().item()) < 1e-5


@pytest.mark.parametrize(
    "dtype, accumulated",
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_accumulation_is_at_least_fp32(dtype: torch.dtype, accumulated: torch.dtype) -> None:
    assert accumulation_dtype(dtype) is accumulated
