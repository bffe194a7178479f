# SPDX-License-Identifier: Apache-2.0
"""New rows are the mean of the trained ones, the same whether one rank or two hold them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_csbp.configuration.new_row_rules import NewRows
from megatron_csbp.new_rows import fill_new_rows, start_rows_anew_when_loaded
from tests.support.gloo_ranks import facts_of_ranks

ROWS, HIDDEN, TRAINED, MASK, ADDED = 12, 5, 8, 3, 10
CASES = {
    "mean": (0.0, 0, torch.float32),
    "noise": (0.5, 0, torch.float32),
    "noise of an output layer": (0.5, 1, torch.float32),
    "bf16": (0.0, 0, torch.bfloat16),
}


def new_rows(noise_std: float = 0.0) -> NewRows:
    return NewRows(MASK, ADDED, TRAINED, noise_std, seed=7, checkpoint="")


def weights(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)


def collect() -> dict[str, Any]:
    rank = dist.get_rank()
    alone = [dist.new_group([other]) for other in range(2)][rank]
    facts: dict[str, Any] = {}
    for name, (noise_std, stream, dtype) in CASES.items():
        whole, share = weights(dtype), weights(dtype).chunk(2)[rank].clone()
        fill_new_rows(whole, new_rows(noise_std), alone, stream)
        fill_new_rows(share, new_rows(noise_std), dist.group.WORLD, stream)
        facts[name] = {"whole": whole.tolist(), "share": share.tolist()}
    model = torch.nn.Module()
    model.embedding = torch.nn.Module()
    model.embedding.word_embeddings = torch.nn.Embedding(ROWS, HIDDEN)
    model.output_layer = torch.nn.Linear(HIDDEN, ROWS, bias=False)
    model.share_embeddings_and_output_weights = False
    start_rows_anew_when_loaded(model, new_rows(), alone)
    loaded = {
        "embedding.word_embeddings.weight": weights(torch.float32),
        "output_layer.weight": torch.ones(ROWS, HIDDEN),
    }
    model.load_state_dict(loaded)
    facts["loaded"] = [model.embedding.word_embeddings.weight.tolist(), model.output_layer.weight.tolist()]
    return facts


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return facts_of_ranks(collect, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_make_the_rows_of_one(name: str, facts: list[dict[str, Any]]) -> None:
    whole = facts[0][name]["whole"]
    assert facts[0][name]["share"] + facts[1][name]["share"] == whole
    before = weights(CASES[name][2]).tolist()
    changed = {row for row in range(ROWS) if whole[row] != before[row]}
    assert changed == {MASK, 10, 11}


def test_they_are_the_mean_of_the_trained_rows(facts: list[dict[str, Any]]) -> None:
    trained = [row for row in range(TRAINED) if row != MASK]
    mean = weights(torch.float32).double()[trained].mean(0).float()
    found = torch.tensor(facts[0]["mean"]["whole"])
    for row in (MASK, 10, 11):
        assert torch.equal(found[row], mean)
    noisy = torch.tensor(facts[0]["noise"]["whole"])[[MASK, 10, 11]] - mean
    assert 0.2 < noisy.std() < 0.9
    assert not torch.equal(noisy[1], noisy[2])
    of_output = torch.tensor(facts[0]["noise of an output layer"]["whole"])[MASK] - mean
    assert not torch.equal(noisy[0], of_output)


def test_they_change_as_weights_are_loaded(facts: list[dict[str, Any]]) -> None:
    embedding, output = facts[1]["loaded"]
    assert embedding == facts[1]["mean"]["whole"]
    assert output == torch.ones(ROWS, HIDDEN).tolist()
