# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch

from megatron_csbp.objectives import CleanRows, ObjectiveConfig, build_objective
from megatron_csbp.objectives.interface import LossRows, LossSums
from megatron_csbp.objectives.noise import SampleNoise
from megatron_csbp.objectives.noise_schedules import noise_times
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import Scheme, Sharding

LENGTH, BLOCK, MASK = 96, 8, 500
TEXT = np.arange(LENGTH + 1) + 1000
NOISES = [SampleNoise(7, 0, 3, view=view) for view in range(2)]
OBJECTIVE = build_objective(ObjectiveConfig(name="fast-dllm-v2", mask_token_id=MASK))


def clean_rows(rows: RankRows, supervised: np.ndarray) -> CleanRows:
    here = rows.sample_positions
    padded = np.append(supervised, False)
    in_document = here + 1 < rows.document_stops
    return CleanRows(
        tokens=TEXT[here],
        next_tokens=TEXT[here + 1],
        supervised=padded[here],
        next_supervised=padded[here + 1],
        next_token_supervised=padded[here + 1] & in_document,
    )


def place(rows: RankRows, supervised: np.ndarray, noises: list[SampleNoise] = NOISES) -> LossRows:
    return OBJECTIVE.place(clean_rows(rows, supervised), noises, rows)


def whole(documents: list[tuple[int, int]] | None = None) -> RankRows:
    sample = Sample(LENGTH, BLOCK, 2, None if documents is None else np.array(documents))
    return RankRows(sample, Sharding())


def scored_positions(rows: RankRows, placed: LossRows, view: int) -> np.ndarray:
    """Positions of the tokens that a view's rows are asked for."""
    return rows.sample_positions[(rows.copies == view) & (placed.weights > 0)] + 1


def test_each_supervised_token_but_the_first_is_scored_once_over_the_pair() -> None:
    supervised = np.random.default_rng(0).random(LENGTH) < 0.7
    rows = whole()
    placed = place(rows, supervised)
    scored = np.concatenate([scored_positions(rows, placed, view) for view in range(2)])
    assert sorted(scored) == [position for position in np.flatnonzero(supervised) if position > 0]
    assert placed.num_tokens == placed.num_supervised == len(scored)
    assert set(placed.weights) == {0.0, 1.0}


def test_a_view_is_asked_for_just_the_tokens_that_it_masks() -> None:
    rows = whole()
    placed = place(rows, np.ones(LENGTH, dtype=bool))
    for view in range(2):
        masked = rows.sample_positions[(rows.copies == view) & (placed.tokens == MASK)]
        assert sorted(scored_positions(rows, placed, view)) == [position for position in masked if position > 0]
        targets = placed.targets[(rows.copies == view) & (placed.weights > 0)]
        assert (targets == TEXT[scored_positions(rows, placed, view)]).all()


def test_the_views_mask_complementary_tokens_and_the_clean_copy_none() -> None:
    rows = whole()
    supervised = np.arange(LENGTH) % 3 > 0
    placed = place(rows, supervised)
    masked = [set(rows.sample_positions[(rows.copies == view) & (placed.tokens == MASK)]) for view in range(2)]
    assert masked[0] | masked[1] == set(np.flatnonzero(supervised))
    assert not masked[0] & masked[1]
    assert masked[0]
    assert masked[1]
    assert (placed.tokens[rows.copies == -1] == TEXT[:LENGTH]).all()


def test_the_first_token_of_a_block_is_predicted_by_the_last_row_of_the_block_before_it() -> None:
    rows = whole()
    placed = place(rows, np.ones(LENGTH, dtype=bool))
    firsts = [
        position for view in range(2) for position in scored_positions(rows, placed, view) if not position % BLOCK
    ]
    assert sorted(firsts) == list(range(BLOCK, LENGTH, BLOCK))


def test_the_first_token_of_a_document_is_never_scored_and_padding_neither() -> None:
    documents = [(0, 13), (16, 64), (64, 96)]
    rows = whole(documents)
    placed = place(rows, np.ones(LENGTH, dtype=bool))
    scored = sorted(position for view in range(2) for position in scored_positions(rows, placed, view))
    assert scored == [position for start, stop in documents for position in range(start + 1, stop)]


@pytest.mark.parametrize("split", [0, 1], ids=["training", "evaluation"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_place_the_same_rows_as_one_rank(size: int, split: int) -> None:
    noises = [SampleNoise(7, split, 3, view=view) for view in range(2)]
    sharding = Sharding(size, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL)
    length = 2 * size * BLOCK * (LENGTH // (2 * size * BLOCK))
    sample = Sample(length, BLOCK, 2)
    supervised = np.random.default_rng(1).random(LENGTH) < 0.8
    one = RankRows(sample, Sharding())
    wanted = {
        (copy, position): (token, target, weight)
        for copy, position, token, target, weight in zip(
            one.copies, one.sample_positions, *columns(place(one, supervised, noises)), strict=True
        )
    }
    got = {}
    for rank in range(size):
        rows = RankRows(sample, sharding, rank)
        columns_of_rank = columns(place(rows, supervised, noises))
        for copy, position, *values in zip(rows.copies, rows.sample_positions, *columns_of_rank, strict=True):
            got[copy, position] = tuple(values)
    assert got == wanted


@pytest.mark.parametrize("split", [1, 2])
def test_in_evaluation_the_same_tokens_weigh_one_over_the_chance_that_they_had(split: int) -> None:
    rows, supervised = whole(), np.random.default_rng(0).random(LENGTH) < 0.7
    noises = [SampleNoise(7, split, 3, view=view) for view in range(2)]
    placed = place(rows, supervised, noises)
    times = noise_times(noises[0].block_levels(LENGTH // BLOCK), OBJECTIVE.config.noise_eps)
    for view in range(2):
        chance = times if view == 0 else 1 - times
        weighs = (rows.copies == view) & (placed.weights > 0)
        expected = 1 / chance[(rows.sample_positions[weighs] + 1) // BLOCK]
        np.testing.assert_allclose(placed.weights[weighs], expected, rtol=1e-6)
    assert placed.num_tokens == np.count_nonzero(placed.weights) == supervised[1:].sum()


def test_tokens_that_are_always_masked_leave_none_to_the_other_view() -> None:
    always = build_objective(ObjectiveConfig(name="fast-dllm-v2", mask_token_id=MASK, noise_eps=1.0))
    rows, everything = whole(), np.ones(LENGTH, dtype=bool)
    placed = always.place(clean_rows(rows, everything), [SampleNoise(7, 1, 3)] * 2, rows)
    assert (placed.weights[rows.copies == 0] == (rows.sample_positions[rows.copies == 0] < LENGTH - 1)).all()
    assert not placed.weights[rows.copies != 0].any()


def test_the_reported_bound_is_unbiased() -> None:
    """Two tokens of a block, each easier to guess if the other is seen: the mean over both orders."""
    sample = Sample(8, 4, 2, np.array([(0, 3)]))
    rows, alone, seen = RankRows(sample, Sharding()), np.array([0.9, 1.4]), np.array([0.3, 0.5])
    exact = 0.5 * (alone[0] + seen[1]) + 0.5 * (alone[1] + seen[0])
    means, bounds = [], []
    for index in range(5000):
        noises = [SampleNoise(11, 1, index, view=view) for view in range(2)]
        # Tokens 1 and 2, which rows 0 and 1 predict.
        supervised = np.arange(LENGTH) % 3 > 0
        placed = OBJECTIVE.place(clean_rows(rows, supervised), noises, rows)
        loss = entropy = 0.0
        for view in range(2):
            weights = placed.weights[(rows.copies == view) & (rows.sample_positions < 2)]
            losses = np.where(weights[::-1] > 0, alone, seen)
            loss += float(weights @ losses)
            entropy += float((weights > 0) @ losses)
        count = torch.tensor(placed.num_supervised)
        none = torch.tensor(0.0)
        sums = LossSums(torch.tensor(loss), torch.tensor(entropy), none, count, none, count, count)
        reports = OBJECTIVE.reports(sums, evaluating=True)
        bounds.append(float(reports["nelbo"][0] / reports["nelbo"][1]))
        means.append(float(reports["lm loss"][0] / reports["lm loss"][1]))
    assert abs(np.mean(bounds) - exact / 2) < 4 * np.std(bounds) / np.sqrt(len(bounds)) < 0.1 * exact
    # Both masked in one view, with chance t^2 + (1 - t)^2: 2/3 of the time. Else each sees the other.
    expected = (2 * alone.mean() + seen.mean()) / 3
    assert abs(np.mean(means) - expected) < 4 * np.std(means) / np.sqrt(len(means)) < 0.1 * exact


def columns(placed: LossRows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return placed.tokens, placed.targets, placed.weights


@pytest.mark.parametrize(
    "flags, flag",
    [
        ({"ar_loss_weight": 0.5}, "--ar-loss-weight 0.5"),
        ({"diffusion_loss_weight": 0.3}, "--diffusion-loss-weight 0.3"),
        ({"noise_schedule": "cosine"}, "--noise-schedule cosine"),
        ({"num_views": 1}, "--corrupted-views 1"),
    ],
)
def test_what_the_recipe_has_no_place_for_is_refused(flags: dict[str, object], flag: str) -> None:
    with pytest.raises(ValueError, match=flag):
        build_objective(ObjectiveConfig(name="fast-dllm-v2", mask_token_id=MASK, **flags))  # type: ignore[arg-type]
