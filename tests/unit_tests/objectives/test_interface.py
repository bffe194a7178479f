# SPDX-License-Identifier: Apache-2.0
"""What holds for every objective."""

import pickle

import numpy as np
import pytest
import torch

from megatron_csbp.objectives import (
    OBJECTIVES,
    LossRows,
    LossSums,
    Objective,
    ObjectiveConfig,
    build_objective,
)
from megatron_csbp.objectives.interface import ratio
from megatron_csbp.objectives.noise import SampleNoise
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.scheme import CLEAN, BlockAssignment, Scheme
from tests.unit_tests.objectives.support import TOPOLOGIES, layouts_of, reassembled, rows_under, single

MASK, LENGTH, BLOCK = 99, 96, 4
TEXT = np.random.default_rng(0).integers(0, 90, LENGTH + 1)
SUPERVISED = np.random.default_rng(1).random(LENGTH) < 0.8
NEXT_SUPERVISED = np.random.default_rng(2).random(LENGTH) < 0.8
NOISES = [SampleNoise(1234, 0, 5, view) for view in range(2)]
SAME_POSITION = [name for name in OBJECTIVES if name != "fast-dllm-v2"]  # a row predicts its own position


def built(name: str, **options: object) -> Objective:
    return build_objective(ObjectiveConfig(name=name, mask_token_id=MASK, **options))


def placed(objective: Objective, layout: RankRows) -> LossRows:
    return objective.place(
        rows_under(layout, TEXT, SUPERVISED, NEXT_SUPERVISED), NOISES[: objective.default_num_views], layout
    )


def sums(corrupted: float, clean: float, counts: tuple[int, int, int, int]) -> LossSums:
    return LossSums(*map(torch.tensor, (corrupted, corrupted, clean, *counts)))


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("scheme, size, assignment", TOPOLOGIES)
def test_every_topology_places_the_same_rows_once(
    name: str, scheme: Scheme, size: int, assignment: BlockAssignment
) -> None:
    objective = built(name)
    views = objective.default_num_views
    expected_layout = single(LENGTH, BLOCK, views)
    expected = placed(objective, expected_layout)
    layouts = layouts_of(LENGTH, BLOCK, scheme, size, assignment, views)
    ranks = [placed(objective, layout) for layout in layouts]
    for copy in (*range(views), CLEAN):
        for field in ("tokens", "targets", "weights"):
            whole = reassembled(layouts, [getattr(rank, field) for rank in ranks], copy)
            single_rank = reassembled([expected_layout], [getattr(expected, field)], copy)
            np.testing.assert_array_equal(whole, single_rank)
    assert sum(rank.num_tokens for rank in ranks) == expected.num_tokens
    assert sum(rank.num_supervised for rank in ranks) == expected.num_supervised
    assert expected.num_supervised == SUPERVISED[0 if name in SAME_POSITION else 1 :].sum()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_row_that_another_rank_counts_has_no_weight(name: str) -> None:
    objective = built(name)
    for layout in layouts_of(LENGTH, BLOCK, Scheme.BLOCK_PARALLEL, 2, views=objective.default_num_views):
        assert not placed(objective, layout).weights[~layout.is_counted].any()


@pytest.mark.parametrize("name", SAME_POSITION)
def test_corrupted_rows_are_masked_or_copied_and_only_masked_rows_weigh(name: str) -> None:
    layout = single(LENGTH, BLOCK)
    rows = placed(built(name), layout)
    corrupted, data = layout.is_corrupted, TEXT[layout.positions]
    masked = corrupted & (rows.tokens == MASK)
    assert 0 < masked.sum() < corrupted.sum()
    assert SUPERVISED[layout.positions[masked]].all()
    np.testing.assert_array_equal(rows.tokens[~masked], data[~masked])
    np.testing.assert_array_equal(rows.targets[corrupted], data[corrupted])
    np.testing.assert_array_equal(rows.weights[corrupted] > 0.0, masked[corrupted])


@pytest.mark.parametrize("name", SAME_POSITION)
def test_a_data_token_equal_to_the_mask_id_is_an_ordinary_token(name: str) -> None:
    layout = single(LENGTH, BLOCK)
    ordinary = built(name).place(rows_under(layout, np.full(LENGTH + 1, 7)), NOISES[:1], layout)
    same = built(name).place(rows_under(layout, np.full(LENGTH + 1, MASK)), NOISES[:1], layout)
    np.testing.assert_array_equal(same.weights, ordinary.weights)
    assert (same.num_tokens, same.num_supervised) == (ordinary.num_tokens, ordinary.num_supervised)
    assert 0 < np.count_nonzero(same.weights[layout.is_corrupted]) < LENGTH
    assert (same.tokens == MASK).all()
    assert (same.targets == MASK).all()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_sample_without_anything_to_predict_has_no_loss(name: str) -> None:
    objective, nothing = built(name), np.zeros(LENGTH, dtype=bool)
    layout = single(LENGTH, BLOCK, objective.default_num_views)
    rows = objective.place(rows_under(layout, TEXT, nothing, nothing), NOISES[: objective.default_num_views], layout)
    assert not rows.weights.any()
    assert (rows.num_tokens, rows.num_supervised) == (0, 0)
    np.testing.assert_array_equal(rows.tokens, TEXT[layout.positions])


@pytest.mark.parametrize("name", SAME_POSITION)
def test_another_view_is_another_corruption(name: str) -> None:
    layout = single(LENGTH, BLOCK)
    rows = rows_under(layout, TEXT)
    one, other = (built(name).place(rows, [SampleNoise(1, 0, 0, view=view)], layout) for view in (0, 1))
    assert (one.tokens != other.tokens).any()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_rows_have_the_dtypes_that_the_model_takes(name: str) -> None:
    objective = built(name)
    rows = placed(objective, single(LENGTH, BLOCK, objective.default_num_views))
    assert (rows.tokens.dtype, rows.targets.dtype, rows.weights.dtype) == (np.int64, np.int64, np.float32)
    assert type(rows.num_tokens) is type(rows.num_supervised) is int


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_reaches_spawned_data_workers(name: str) -> None:
    objective = pickle.loads(pickle.dumps(built(name)))
    layout = single(LENGTH, BLOCK, objective.default_num_views)
    np.testing.assert_array_equal(placed(objective, layout).tokens, placed(built(name), layout).tokens)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_first_report_is_the_training_loss_and_evaluation_adds_the_bound(name: str) -> None:
    some = sums(6.0, 4.0, (3, 5, 8, 4))
    training, evaluation = (built(name).reports(some, evaluating) for evaluating in (False, True))
    assert next(iter(training)) == next(iter(evaluation)) == "lm loss"
    assert set(evaluation) - set(training) == {"nelbo"}


def test_reports_of_no_token_at_all_are_zero_and_vanish_in_larger_sums() -> None:
    numerator, denominator = ratio(torch.tensor(0.0), torch.tensor(0))
    assert numerator / denominator == 0.0
    assert denominator + torch.tensor(5.0) == 5.0


def test_an_unknown_objective_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"--diffusion-objective mdlm is not .* block-diffusion.* nemotron"):
        built("mdlm")


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="noise_shedule"):
        built("nemotron", noise_shedule="log")


def test_a_negative_mask_id_is_refused() -> None:
    with pytest.raises(ValueError, match="--mask-token-id -1 must be a token id"):
        ObjectiveConfig(name="nemotron", mask_token_id=-1)
