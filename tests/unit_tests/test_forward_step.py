# SPDX-License-Identifier: Apache-2.0
"""The forward step's loss equals the definition, computed by hand from the logits of every row."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.functional.model_flags import BLOCK_DIFFUSION, MODEL, NEMOTRON, TRAINING, words
from tests.support.megatron_run import Ranks

LENGTH, ROWS, MASK = 64, 128, 190
ARGUMENTS = [
    *MODEL,
    *TRAINING,
    *words("--num-layers 2 --num-query-groups 1 --micro-batch-size 2 --global-batch-size 2 --train-iters 1"),
    *words("--rerun-mode disabled"),
]


def random_batch(clean_rows_carry_loss: bool, seed: int = 0) -> dict[str, Any]:
    """Return two sequences on one rank: corrupted rows first. Every seventh target is the mask id itself."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(MASK, (2, ROWS), generator=generator)
    labels = torch.randint(MASK, (2, ROWS), generator=generator)
    labels[:, ::7] = MASK
    weights = torch.rand(2, ROWS, generator=generator) * 3
    weights[torch.rand(2, ROWS, generator=generator) < 0.5] = 0.0
    if not clean_rows_carry_loss:
        weights[:, LENGTH:] = 0.0
    return {
        "tokens": tokens.tolist(),
        "labels": labels.tolist(),
        "loss_weights": weights.tolist(),
        "num_tokens": [50, 60],
        "num_supervised": [LENGTH, LENGTH - 1],
    }


def losses(
    ranks: Ranks,
    folder: Path,
    arguments: list[str],
    batch: dict[str, Any],
    world_size: int = 1,
    evaluate: bool = False,
) -> dict[str, Any]:
    request = {
        "arguments": arguments,
        "batch": batch,
        "evaluate": evaluate,
        "result": str(folder / "result.json"),
    }
    ranks.call("tests.support.loss_probe:run", request, world_size).check()
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


@pytest.mark.parametrize(
    "topology, world_size",
    [([], 1), (words("--tensor-model-parallel-size 2 --sequence-parallel"), 2)],
    ids=["one rank", "tp2, sequence parallel"],
)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_nemotron_loss_is_what_its_formula_says(
    topology: list[str], world_size: int, tied: bool, ranks: Ranks, tmp_path: Path
) -> None:
    arguments = [*ARGUMENTS, *NEMOTRON, *words("--diffusion-loss-weight 0.5 --ar-loss-weight 2"), *topology]
    arguments += [] if tied else ["--untie-embeddings-and-output-weights"]
    batch = random_batch(clean_rows_carry_loss=True)
    found = losses(ranks, tmp_path, arguments, batch, world_size)
    corrupted, clean = found["by_hand"]["corrupted"], found["by_hand"]["clean"]
    weights = torch.tensor(batch["loss_weights"])
    assert found["loss"] == pytest.approx(corrupted + clean, rel=2e-6)
    assert found["num_tokens"] == 110
    assert found["rows"] == weights.count_nonzero()
    assert found["reports"] == {
        "lm loss": pytest.approx([corrupted + clean, 110], rel=2e-6),
        "diffusion loss": pytest.approx([corrupted / 0.5, 2 * LENGTH - 1], rel=2e-6),
        "ar loss": pytest.approx([clean / 2, weights[:, LENGTH:].count_nonzero().item()], rel=2e-6),
        "masked fraction": [weights[:, :LENGTH].count_nonzero().item(), 2 * LENGTH - 1],
    }


@pytest.mark.parametrize(
    "topology, world_size",
    [([], 1), (words("--tensor-model-parallel-size 2"), 2)],
    ids=["one rank", "tp2"],
)
def test_the_block_diffusion_loss_excludes_the_mask_token_save_where_the_data_hold_it(
    topology: list[str], world_size: int, ranks: Ranks, tmp_path: Path
) -> None:
    batch = random_batch(clean_rows_carry_loss=False)
    found = losses(ranks, tmp_path, [*ARGUMENTS, *BLOCK_DIFFUSION, *topology], batch, world_size, evaluate=True)
    corrupted = found["by_hand"]["corrupted"]
    assert found["by_hand"]["clean"] == 0.0
    assert found["loss"] == pytest.approx(corrupted, rel=2e-6)
    assert found["reports"] == {
        "lm loss": pytest.approx([corrupted, 110], rel=2e-6),
        "nelbo": pytest.approx([corrupted, 2 * LENGTH - 1], rel=2e-6),
    }


def test_a_batch_without_loss_computes_one_row_of_weight_0(ranks: Ranks, tmp_path: Path) -> None:
    batch = random_batch(clean_rows_carry_loss=False)
    batch["loss_weights"] = [[0.0] * ROWS] * 2
    batch["num_tokens"] = batch["num_supervised"] = [0, 0]
    found = losses(ranks, tmp_path, [*ARGUMENTS, *BLOCK_DIFFUSION], batch)
    assert (found["loss"], found["num_tokens"], found["rows"]) == (0.0, 0, 1)
    numerator, denominator = found["reports"]["lm loss"]
    assert numerator == 0.0
    assert 0.0 < denominator < 1e-20
