# SPDX-License-Identifier: Apache-2.0
"""Every tensor of a model is in its checkpoint with its shape, and none is left over."""

from pathlib import Path

import pytest

from megatron_csbp.configuration.checkpoint_folder import Checkpoint
from megatron_csbp.configuration.weight_rules import compare_weights
from megatron_csbp.megatron_checkpoints import Expected

CHECKPOINT = Checkpoint("--load x", Path("x/iter_0000010"), 10, False)
STORED = {"embedding.weight": (192, 64), "decoder.linear.weight": (2, 64, 64)}


def expected(**changes: Expected) -> dict[str, Expected]:
    return {name: Expected(shape, name.startswith("embedding")) for name, shape in STORED.items()} | changes


def test_the_same_model_is_accepted() -> None:
    compare_weights(CHECKPOINT, expected(), STORED)


def test_an_embedding_may_grow() -> None:
    compare_weights(CHECKPOINT, expected() | {"embedding.weight": Expected((256, 64), may_grow=True)}, STORED)


def test_weights_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"it has decoder.linear.weight \[2, 64, 64\] instead of \[3, 64, 64\]\."):
        compare_weights(CHECKPOINT, expected() | {"decoder.linear.weight": Expected((3, 64, 64), False)}, STORED)


def test_missing_and_left_over_weights_are_refused() -> None:
    with pytest.raises(ValueError, match=r"those of this model: it lacks bias\. Use the model flags"):
        compare_weights(CHECKPOINT, expected(bias=Expected((64,), False)), STORED)
    many = {f"bias{i}": (64,) for i in range(7)}
    with pytest.raises(ValueError, match=r"the model has no bias0, bias1, bias2, bias3, bias4 and 2 more\."):
        compare_weights(CHECKPOINT, expected(), STORED | many)
