# SPDX-License-Identifier: Apache-2.0
"""Recipes pass every check at their own world size, and train when made small."""

import json
from pathlib import Path
from typing import Any

import pytest

from examples.recipe_models import RECIPES
from examples.recipes import text
from tests.support.megatron_run import Ranks

NAMES = {f"{recipe.model.folder}/{recipe.path.stem}": recipe for recipe in RECIPES}
LONGEST = [name for name in NAMES if name.endswith("_256k")]
SMALL = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --num-query-groups 2 "
    "--kv-channels 16 --seq-length 256 --max-position-embeddings 256 --padded-vocab-size 192 "
    "--vocab-size 187 --mask-token-id 190 --global-batch-size 2 --train-iters 3 --lr-warmup-iters 1 --eval-iters 1 "
    "--eval-interval 3 --log-interval 1 --num-workers 0 --context-parallel-size 2 --bp-size 2"
)
WITHOUT_DATA = "--mock-data --tokenizer-type NullTokenizer --split 90,5,5 --mask-token-id 5000"
"""Mock data count to 4,094 at most, and hold the mask token of Nemotron-Labs-Diffusion."""


SMALL_HYBRID = (
    "--num-layers 4 --tensor-model-parallel-size 1 --diffusion-block-size 32 --linear-num-key-heads 2 "
    "--linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8"
)
SAME_AS_ANOTHER = "qwen_ar_to_bdlm/3.8_27b"
"""Qwen3.8 27B has the sizes of Qwen3.5 27B."""


def from_file(name: str, *arguments: str) -> list[str]:
    return ["--yaml-cfg", str(NAMES[name].path), *WITHOUT_DATA.split(), *arguments]


def validated(name: str, ranks: Ranks, folder: Path) -> dict[str, Any]:
    # Of Megatron's stand-in tokenizer, which adds an end-of-document token.
    arguments = from_file(name, "--vocab-size", "131071")
    if NAMES[name].model.delta_net is not None:
        arguments += ["--csbp-delta-net-backend", "torch"]  # fla is not installed, and would be refused
    request = {
        "arguments": arguments,
        "world_size": NAMES[name].model.gpus,
        "facts": str(folder / "facts.json"),
        "as_on_hopper": True,
    }
    ranks.call("tests.support.example_arguments:validate", request).check()
    facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    return facts


def test_the_recipes_are_what_the_script_writes() -> None:
    written = {path for folder in {recipe.path.parent for recipe in RECIPES} for path in folder.iterdir()}
    assert written == {recipe.path for recipe in RECIPES}
    assert [name for name, recipe in NAMES.items() if recipe.path.read_text() != text(recipe)] == []


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[] if name in LONGEST and not name.startswith(SAME_AS_ANOTHER) else [pytest.mark.slow]
        )
        for name in NAMES
    ],
)
def test_a_recipe_passes_all_checks_of_a_gpu_at_its_world_size(name: str, ranks: Ranks, tmp_path: Path) -> None:
    """Without a GPU, `test_dry_run.py` takes all of them through the checks."""
    facts = validated(name, ranks, tmp_path)
    assert facts["diffusion_scheme"] == "CSBP"
    recipe = NAMES[name]
    assert facts["data_parallel_size"] == recipe.data_parallel
    assert facts["context_parallel_size"] == facts["block_parallel_size"] == recipe.group
    assert facts["clean_seq_length"] == recipe.tokens
    assert facts["seq_length"] == recipe.copies * recipe.tokens
    if recipe.model.is_qwen:
        assert facts["padded_vocab_size"] == (151_936 if recipe.model.delta_net is None else 248_320)
        assert facts["model"]["qk_layernorm"] is True
        assert facts["model"]["attention_output_gate"] == (recipe.model.delta_net is not None)
    else:
        assert facts["padded_vocab_size"] == 131_072
        assert facts["model"]["yarn_rotary_scaling_factor"] == 16.0
        assert facts["model"]["yarn_original_max_position_embeddings"] == 16_384


@pytest.mark.parametrize(
    "name, world_size, size",
    [
        ("qwen_ar_to_bdlm/0.6b_128k", 2, []),
        ("nemotron_diffusion/8b_256k", 4, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
        pytest.param("qwen_ar_to_bdlm/3.5_27b_256k", 2, SMALL_HYBRID.split(), marks=pytest.mark.slow),
    ],
)
def test_a_recipe_trains_when_made_small(name: str, world_size: int, size: list[str], ranks: Ranks) -> None:
    arguments = from_file(name, *SMALL.split(), *size)
    run = ranks.train(arguments, world_size).check()
    losses = run.losses()
    assert len(losses) == 3
    assert all(0.0 < loss < 10.0 for loss in losses)
    assert run.evaluated("lm loss")[0] > 0.0


def test_a_recipe_trains_as_on_a_gpu_without_transformer_engine_and_apex(ranks: Ranks) -> None:
    arguments = [*from_file("nemotron_diffusion/8b_256k", *SMALL.split()), "--tensor-model-parallel-size", "2"]
    run = ranks.train(arguments, 4, hooks=["tests.support.pretended_gpu:pretend_hopper"]).check()
    assert len(run.losses()) == 3
    for line in (
        "note: CUDA_DEVICE_MAX_CONNECTIONS was not set; it is 1 now",
        "transformer_impl: transformer_engine -> local (Transformer Engine is not installed",
        "gradient_accumulation_fusion: True -> False (Apex' fused weight gradient",
        "no_persist_layer_norm: False -> True (Apex' persistent layer norm is not installed: no apex)",
        "apply_rope_fusion: True -> False",
    ):
        assert line in run.output
