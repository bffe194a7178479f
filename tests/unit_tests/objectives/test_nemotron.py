# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch

from megatron_csbp.objectives import LossSums, Objective, ObjectiveConfig, build_objective
from megatron_csbp.objectives.noise import SampleNoise
from megatron_csbp.transformer.geometry.scheme import CLEAN, BlockAssignment, Scheme
from megatron_csbp.transformer.geometry.visibility import CleanAttention
from tests.unit_tests.objectives.support import TOPOLOGIES, layouts_of, reassembled, rows_under, single

MASK, LENGTH, BLOCK, EPS = 99, 64, 4, 1e-3
TEXT = np.random.default_rng(4).permutation(90)[: LENGTH + 1]
NOISE = SampleNoise(1234, 0, 5, 0)


def built(**options: object) -> Objective:
    return build_objective(ObjectiveConfig(name="nemotron", mask_token_id=MASK, noise_eps=EPS, **options))


def test_it_is_the_published_objective() -> None:
    objective = built()
    assert objective.default_clean_attention is CleanAttention.TOKEN_CAUSAL
    assert not objective.excludes_mask_logit
    assert objective.loss_on_clean_rows
    assert (objective.diffusion_loss_weight, objective.ar_loss_weight) == (0.3, 1.0)


def test_one_level_holds_for_the_whole_sequence() -> None:
    layout = single(LENGTH, BLOCK)
    rows = built(diffusion_loss_weight=0.6).place(rows_under(layout, TEXT), [NOISE], layout)
    chance = (1 - EPS) * NOISE.sequence_level() + EPS
    weights = rows.weights[layout.is_corrupted]
    np.testing.assert_allclose(weights[weights > 0], 0.6 / chance, rtol=1e-6)
    assert abs(np.mean(weights > 0) - chance) < 4 * np.sqrt(chance * (1 - chance) / LENGTH)


@pytest.mark.parametrize("scheme, size, assignment", TOPOLOGIES)
def test_clean_rows_predict_the_next_token_across_chunks_and_ranks(
    scheme: Scheme, size: int, assignment: BlockAssignment
) -> None:
    layouts = layouts_of(LENGTH, BLOCK, scheme, size, assignment)
    ranks = [built(ar_loss_weight=0.7).place(rows_under(layout, TEXT), [NOISE], layout) for layout in layouts]
    np.testing.assert_array_equal(reassembled(layouts, [rank.targets for rank in ranks], CLEAN), TEXT[1:])
    weights = reassembled(layouts, [rank.weights for rank in ranks], CLEAN)
    np.testing.assert_array_equal(weights, np.float32(0.7))


def test_the_denominator_is_masked_plus_autoregressive_rows() -> None:
    layout = single(LENGTH, BLOCK)
    asked = np.arange(LENGTH) % 5 > 0
    rows = built().place(rows_under(layout, TEXT, next_supervised=asked), [NOISE], layout)
    clean = ~layout.is_corrupted
    np.testing.assert_array_equal(rows.weights[clean] > 0, asked)
    assert rows.num_tokens == np.count_nonzero(rows.weights[layout.is_corrupted]) + asked.sum()
    assert rows.num_supervised == LENGTH


def test_without_the_autoregressive_term_clean_rows_carry_nothing() -> None:
    layout, objective = single(LENGTH, BLOCK), built(ar_loss_weight=0.0)
    rows = objective.place(rows_under(layout, TEXT), [NOISE], layout)
    assert not objective.loss_on_clean_rows
    assert not rows.weights[~layout.is_corrupted].any()
    assert rows.num_tokens == np.count_nonzero(rows.weights)
    none = torch.tensor(0)
    sums = LossSums(torch.tensor(1.0), torch.tensor(0.0), torch.tensor(0.0), none, none, none, none)
    assert "ar loss" not in objective.reports(sums, evaluating=True)


def test_reports_take_the_weights_out_again() -> None:
    counts = [torch.tensor(n) for n in (10, 20, 30, 40)]
    sums = LossSums(torch.tensor(6.0), torch.tensor(5.0), torch.tensor(8.0), *counts)
    reports = built(diffusion_loss_weight=0.5, ar_loss_weight=2.0).reports(sums, evaluating=True)
    values = {name: (numerator.item(), denominator.item()) for name, (numerator, denominator) in reports.items()}
    assert values == {
        "lm loss": (14.0, 30.0),
        "diffusion loss": (12.0, 40.0),
        "ar loss": (4.0, 20.0),
        "nelbo": (12.0, 40.0),
    }


@pytest.mark.parametrize(
    "options, message",
    [
        ({"diffusion_loss_weight": 0.0}, "--diffusion-loss-weight 0.0 must be a number above 0. Use 0.3"),
        ({"diffusion_loss_weight": float("inf")}, "--diffusion-loss-weight inf must be a number above 0"),
        ({"ar_loss_weight": -1.0}, "--ar-loss-weight -1.0 must be a number, 0 or more. Use 1.0"),
        ({"ar_loss_weight": float("nan")}, "--ar-loss-weight nan must be a number"),
        ({"noise_schedule": "cosine"}, "--noise-schedule cosine: .* log-linear only. Use --noise-schedule log-linear"),
    ],
)
def test_flags_that_do_not_fit_are_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        built(**options)
