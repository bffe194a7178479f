# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch

from megatron_csbp.objectives import OBJECTIVES, LossSums, Objective, ObjectiveConfig, build_objective
from megatron_csbp.objectives.noise import SampleNoise
from megatron_csbp.objectives.noise_schedules import NOISE_SCHEDULES, noise_times
from megatron_csbp.transformer.geometry.visibility import CleanAttention
from tests.unit_tests.objectives.support import rows_under, single

MASK, LENGTH, BLOCK = 99, 64, 8
TEXT = np.arange(LENGTH + 1) % 90


def built(name: str = "block-diffusion", **options: object) -> Objective:
    return build_objective(ObjectiveConfig(name=name, mask_token_id=MASK, **options))


def test_it_is_the_published_objective() -> None:
    objective = built()
    assert objective.default_clean_attention is CleanAttention.BLOCK_CAUSAL
    assert objective.excludes_mask_logit
    assert not objective.loss_on_clean_rows


@pytest.mark.parametrize("schedule", NOISE_SCHEDULES)
def test_each_block_has_its_own_time_and_the_weight_of_that_time(schedule: str) -> None:
    layout, noise = single(LENGTH, BLOCK), SampleNoise(3, 0, 8, 0)
    rows = built(noise_schedule=schedule, noise_eps=0.05).place(rows_under(layout, TEXT), [noise], layout)
    times = noise_times(noise.block_levels(LENGTH // BLOCK), 0.05)
    weights = rows.weights[layout.is_corrupted].reshape(-1, BLOCK)
    for time, block in zip(times, weights, strict=True):
        expected = NOISE_SCHEDULES[schedule].weight(time)
        np.testing.assert_allclose(block[block > 0], expected, rtol=1e-6)
    assert not rows.weights[~layout.is_corrupted].any()


def test_the_denominator_counts_supervised_tokens_masked_or_not() -> None:
    layout, supervised = single(LENGTH, BLOCK), TEXT[:-1] % 3 > 0
    rows = built().place(rows_under(layout, TEXT, supervised), [SampleNoise(1, 0, 0, 0)], layout)
    assert rows.num_tokens == rows.num_supervised == supervised.sum()
    assert np.count_nonzero(rows.weights) < rows.num_tokens


def test_the_mean_weight_of_a_token_is_one_for_log_linear() -> None:
    layout, rows = single(LENGTH, BLOCK), rows_under(single(LENGTH, BLOCK), TEXT)
    objective = built(noise_eps=1e-2)
    means = np.array(
        [objective.place(rows, [SampleNoise(7, 0, i, 0)], layout).weights.sum() / LENGTH for i in range(3000)]
    )
    assert abs(means.mean() - 1.0) < 4 * means.std() / np.sqrt(len(means))


def toy_cross_entropy(target: int, position: int, seen: int | None) -> float:
    """A model of two tokens: its cross-entropy of one, knowing the other or not."""
    return 0.7 + 0.4 * position + 0.1 * target if seen is None else 0.2 + 0.3 * position + 0.05 * seen


@pytest.mark.parametrize(
    "name, schedule", [*[("block-diffusion", s) for s in NOISE_SCHEDULES], ("nemotron", "log-linear")]
)
def test_the_reported_bound_is_unbiased(name: str, schedule: str) -> None:
    # One block of two tokens: the NELBO is the mean over both orders of predicting one and then the other.
    x, y = 4, 6
    alone = toy_cross_entropy(x, 0, None), toy_cross_entropy(y, 1, None)
    exact = 0.5 * (alone[0] + toy_cross_entropy(y, 1, x)) + 0.5 * (alone[1] + toy_cross_entropy(x, 0, y))
    layout = single(2, 2)
    rows = rows_under(layout, np.array([x, y, 0]))
    objective = built(name, noise_schedule=schedule, noise_eps=1e-3)
    bounds = []
    for sample in range(5000):
        placed = objective.place(rows, [SampleNoise(11, 0, sample, 0)], layout)
        weights = placed.weights[layout.is_corrupted]
        losses = [
            toy_cross_entropy(x, 0, None if weights[1] else y),
            toy_cross_entropy(y, 1, None if weights[0] else x),
        ]
        count = torch.tensor(placed.num_supervised)
        corrupted = torch.tensor(float(np.dot(weights, losses)))
        none = torch.tensor(0.0)
        sums = LossSums(corrupted, none, none, count, count, torch.tensor(placed.num_tokens), count)
        numerator, denominator = objective.reports(sums, evaluating=True)["nelbo"]
        bounds.append(float(numerator / denominator))
    deviation = abs(np.mean(bounds) - exact / 2)
    assert deviation < 4 * np.std(bounds) / np.sqrt(len(bounds))
    assert 4 * np.std(bounds) / np.sqrt(len(bounds)) < 0.1 * exact


def test_at_time_one_everything_is_masked_with_weight_one() -> None:
    layout = single(LENGTH, 1)
    rows = built(noise_eps=1.0).place(rows_under(layout, TEXT), [SampleNoise(1, 0, 0, 0)], layout)
    assert (rows.tokens[layout.is_corrupted] == MASK).all()
    np.testing.assert_array_equal(rows.weights[layout.is_corrupted], 1.0)


def test_blocks_and_samples_without_a_masked_token_weigh_nothing() -> None:
    layout, objective = single(LENGTH, BLOCK), built()
    counts = []
    for sample in range(20):
        rows = objective.place(rows_under(layout, TEXT), [SampleNoise(1, 0, sample, 0)], layout)
        assert np.isfinite(rows.weights).all()
        assert rows.num_tokens == LENGTH
        counts.append((rows.weights[layout.is_corrupted] > 0).reshape(-1, BLOCK).sum(axis=1))
    assert np.min(counts) == 0
    one_block = single(BLOCK, BLOCK)
    empty = [
        not objective.place(
            rows_under(one_block, TEXT[: BLOCK + 1]), [SampleNoise(1, 0, i, 0)], one_block
        ).weights.any()
        for i in range(100)
    ]
    assert any(empty)


@pytest.mark.parametrize("flag", ["ar_loss_weight", "diffusion_loss_weight"])
def test_a_loss_weight_is_refused_by_name(flag: str) -> None:
    spelling = "--" + flag.replace("_", "-")
    with pytest.raises(ValueError, match=f"{spelling} 0.5: .*--diffusion-objective nemotron, or leave the flag out"):
        built(**{flag: 0.5})


def test_the_weights_that_change_nothing_are_accepted() -> None:
    assert built(ar_loss_weight=0.0, diffusion_loss_weight=1.0).name in OBJECTIVES
