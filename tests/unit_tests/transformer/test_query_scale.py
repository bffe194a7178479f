# SPDX-License-Identifier: Apache-2.0
"""The scale of queries by position, against the formula in transformers."""

import pytest
import torch
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from megatron_csbp.transformer.query_scale import QueryScale, query_scale

PUBLISHED = QueryScale(0.1, 16_384)
AROUND = torch.tensor([0, 1, 16_383, 16_384, 16_385, 32_767, 32_768, 49_152, 131_071, 262_143])


def test_equals_the_formula_in_transformers() -> None:
    expected_S = get_llama_4_attn_scale(AROUND[None], 0.1, 16_384)[0, 0, :, 0]
    torch.testing.assert_close(PUBLISHED.factors(AROUND), expected_S, atol=0, rtol=2e-7)
    assert PUBLISHED.factors(AROUND).dtype == torch.float32


def test_is_exactly_1_below_the_original_length_and_steps_there() -> None:
    factors_S = PUBLISHED.factors(AROUND)
    assert factors_S[:3].tolist() == [1.0, 1.0, 1.0]
    assert factors_S[3] == factors_S[4] == factors_S[5] > 1.0
    assert factors_S[6] > factors_S[5]


def test_bf16_queries_are_scaled_in_fp32() -> None:
    query_SBND = torch.randn(AROUND.numel(), 1, 2, 4).bfloat16()
    scaled_SBND = PUBLISHED(query_SBND, AROUND)
    exact_SBND = query_SBND.double() * PUBLISHED.factors(AROUND).double().view(-1, 1, 1, 1)
    assert scaled_SBND.dtype == torch.bfloat16
    assert torch.equal(scaled_SBND, exact_SBND.bfloat16())


@pytest.mark.parametrize("beta", [None, 0.0])
def test_no_slope_is_no_scale(beta: float | None) -> None:
    assert query_scale(beta, 16_384) is None
