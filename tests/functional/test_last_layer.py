# SPDX-License-Identifier: Apache-2.0
"""A last layer whose clean rows end at their keys and values trains like a whole one.

Here on one rank; `test_parity` compares every topology with one rank, all of them with such a last layer.
"""

from pathlib import Path

import pytest

from tests.functional.model_flags import BLOCK_DIFFUSION, DEEP, NEMOTRON, UNTIED_MQA, iterations
from tests.functional.test_parity import CURVE_TOLERANCE, GRADIENT_TOLERANCE, gradients, load
from tests.support.checkpoint_tensors import load_parameters, relative_errors
from tests.support.megatron_run import Ranks, worst_difference

ITERATIONS = 6
DROPS = "last layer: in training, clean rows end at their keys and values"
LENGTH = 64
NUM_LAYERS = {"block-diffusion": 2, "nemotron without its next-token loss": 4}
MODELS = {
    "block-diffusion": [*UNTIED_MQA, *BLOCK_DIFFUSION],
    "nemotron without its next-token loss": [*DEEP, *NEMOTRON, "--ar-loss-weight", "0"],
}


@pytest.mark.parametrize(
    "model", [pytest.param("block-diffusion", marks=pytest.mark.slow), "nemotron without its next-token loss"]
)
def test_dropping_clean_rows_changes_no_loss_and_no_gradient(model: str, ranks: Ranks, tmp_path: Path) -> None:
    flags = MODELS[model]
    saving = [*iterations(1), "--save", str(tmp_path / "start")]
    tell = "tests.functional.hooks:tell_the_rows_of_every_mlp"
    whole = ["tests.functional.hooks:keep_the_last_layer_whole"]
    assert "last layer: whole, since a test wants it" in ranks.train([*flags, *saving], hooks=whole).check().output
    before = load_parameters(tmp_path / "start", 1)
    flags = [*flags, *load(tmp_path / "start")]
    expected = ranks.train([*flags, *iterations(ITERATIONS, evaluate=True)], hooks=[tell, *whole]).check()
    found = ranks.train([*flags, *iterations(ITERATIONS, evaluate=True)], hooks=[tell]).check()
    assert DROPS in found.output
    layers, all_rows = found.output.count("MLP of "), found.output.count(f"MLP of {2 * LENGTH} rows")
    assert layers == expected.output.count("MLP of ") == expected.output.count(f"MLP of {2 * LENGTH} rows")
    assert layers - all_rows == found.output.count(f"MLP of {LENGTH} rows") == layers // NUM_LAYERS[model]
    assert worst_difference(found.losses(), expected.losses()) < CURVE_TOLERANCE
    assert worst_difference(found.grad_norms, expected.grad_norms) < CURVE_TOLERANCE
    assert worst_difference(found.evaluated("nelbo"), expected.evaluated("nelbo")) < CURVE_TOLERANCE
    of_whole = gradients(ranks, flags, before, tmp_path / "whole", hooks=whole)
    errors = relative_errors(gradients(ranks, flags, before, tmp_path / "drops"), of_whole)
    assert {name: error for name, error in errors.items() if not error < GRADIENT_TOLERANCE} == {}
