# SPDX-License-Identifier: Apache-2.0
"""The planner against reality: real training runs, the published sizes of all recipes, and its command."""

import json
from pathlib import Path
from typing import Any

import pytest

from examples.plan_table import README, with_table
from examples.recipe_models import RECIPES
from tests.functional.model_flags import (
    BLOCK_DIFFUSION,
    CSBP2,
    DEEP,
    HYBRID,
    MOE,
    NEMOTRON,
    PP2,
    TIED,
    TP2,
    UNTIED_MQA,
    iterations,
    words,
)
from tests.support.megatron_run import Finished, Ranks
from tests.support.planner_probe import check_measured

PROBE = "tests.support.planner_probe"
NAMES = {f"{recipe.model.folder}/{recipe.path.stem}": recipe for recipe in RECIPES}
LAYER_NORM = [word for word in TIED if word not in ("--normalization", "RMSNorm", "--disable-bias-linear", "--swiglu")]
RUNS = {
    "shared optimizer, joint loss": (
        2,
        [*UNTIED_MQA, *NEMOTRON, *CSBP2, *words("--bf16 --use-distributed-optimizer --qk-layernorm")],
    ),
    "tensor parallel rows": (2, [*TIED, *BLOCK_DIFFUSION, *TP2, *words("--sequence-parallel --bf16")]),
    "fp32": (2, [*TIED, *BLOCK_DIFFUSION, *CSBP2]),
    "experts": (2, [*MOE, *BLOCK_DIFFUSION, *CSBP2, "--bf16"]),
    "delta nets": (2, [*HYBRID, *BLOCK_DIFFUSION, *CSBP2, "--bf16"]),
    "LayerNorm, biases, GELU": (1, [*LAYER_NORM, *BLOCK_DIFFUSION, "--bf16"]),
    "pipeline, CP baseline, attention recomputed": (
        4,
        [
            *DEEP,
            *NEMOTRON,
            *PP2,
            *words("--context-parallel-size 2 --context-scheme cp --bf16"),
            *words("--recompute-granularity selective --recompute-modules core_attn"),
        ],
    ),
}
QUICK = ("shared optimizer, joint loss", "tensor parallel rows")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in RUNS]
)
def test_memory_bytes_and_operations_are_those_of_a_real_run(name: str, ranks: Ranks, tmp_path: Path) -> None:
    size, flags = RUNS[name]
    ledger = ["--csbp-ledger", str(tmp_path / "bytes.jsonl"), "--device", "cpu"]
    ranks.train([*flags, *iterations(1), *ledger], size, hooks=[f"{PROBE}:measure"]).check()
    check_measured(tmp_path, size)


@pytest.fixture(scope="module")
def planned(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The plans of all recipes, made in one process."""
    result = tmp_path_factory.mktemp("plans") / "plans.json"
    ranks.call(f"{PROBE}:plan_recipes", {"result": str(result)}).check()
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def test_every_recipe_passes_all_checks_and_fits_at_its_topology(planned: dict[str, Any]) -> None:
    assert planned.keys() == NAMES.keys()
    for name, recipe in NAMES.items():
        plan = planned[name]["plan"]
        assert plan["fits"], name
        assert plan["topology"]["gpus"] == recipe.model.gpus
        assert plan["topology"]["data"] == recipe.data_parallel
        assert (plan["topology"]["scheme"], plan["topology"]["context"]) == ("CSBP", recipe.group)
        assert plan["tokens"] == recipe.tokens
        assert plan["rows"] == recipe.copies * recipe.tokens // recipe.group


def test_every_recipe_has_the_published_number_of_parameters(planned: dict[str, Any]) -> None:
    for name, found in planned.items():
        published = found["plan"]["published"]
        assert published is not None, name
        assert found["plan"]["parameters"] == published["parameters"], name


def test_the_table_of_the_recipes_is_current(planned: dict[str, Any]) -> None:
    page = README.read_text()
    assert page == with_table(page, [planned[name]["row"] for name in NAMES]), "python -m examples.plan_table"


def run(ranks: Ranks, *arguments: str) -> Finished:
    return ranks.call(f"{PROBE}:plan", {"arguments": list(arguments)})


RECIPE = str(NAMES["nemotron_diffusion/14b_256k"].path)


def test_the_command_plans_a_recipe_by_itself(ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    done = run(ranks, RECIPE, "--gpus", "16", "--compare", "cp,bp,csbp", "--sweep", "--json", str(file)).check()
    for line in (
        "dry run: 16 x h200, 2 node(s) of 8; DP 2 x CSBP 8; full recomputation",
        "every check of a start passed; not checked: data (no --data-path), tokenizer",
        "13,506,073,600 (Nemotron-Labs-Diffusion 14B, as published)",
        "flags of the best: --tensor-model-parallel-size",
    ):
        assert line in done.output
    document = json.loads(file.read_text())
    moved = {scheme: plan["bytes_of_an_iteration"]["every rank"] for scheme, plan in document["compare"].items()}
    per_sample = {scheme: (sizes["clean"] + sizes["corrupted"]) / 8 / 2**30 for scheme, sizes in moved.items()}
    assert per_sample == {"cp": 210.0, "bp": 0.0, "csbp": 105.0}
    best = [entry["seconds"] for entry in document["sweep"] if entry["fits"]]
    assert best == sorted(best)
    assert all(entry["reason"] for entry in document["sweep"] if not entry["fits"])


def test_a_job_that_does_not_fit_leaves_with_status_1(ranks: Ranks) -> None:
    done = run(ranks, RECIPE, "--gpus", "16", "--gpu", "h100")
    assert done.returncodes == [1], done.tail
    assert "DOES NOT FIT" in done.output


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([RECIPE, "--gpus", "12"], "needs a multiple of 8 ranks, and this job has 12"),
        ([RECIPE, "--gpus", "16", "--seq-length", "100001"], "--seq-length 100001 must be a multiple of"),
        ([RECIPE, "--gpus", "16", "--data-path", "/none/data"], "--data-path /none/data"),
        (["--gpus", "2", *TIED, *iterations(1)], "is a plain autoregressive job, which is not planned"),
        ([RECIPE, "--gpus", "16", "--optimizer", "muon"], "muon"),
    ],
)
def test_a_job_that_would_not_start_is_refused(arguments: list[str], said: str, ranks: Ranks) -> None:
    done = run(ranks, *arguments)
    assert done.returncodes == [2], done.tail
    assert said in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    "flags",
    [
        [*DEEP, *NEMOTRON, *CSBP2, *PP2, *words("--num-virtual-stages-per-pipeline-rank 2 --global-batch-size 8")],
        [*MOE, *BLOCK_DIFFUSION, *CSBP2, *words("--expert-model-parallel-size 2 --global-batch-size 8")],
        [*HYBRID, *BLOCK_DIFFUSION, *CSBP2, *TP2, *words("--sequence-parallel --global-batch-size 8")],
    ],
    ids=["interleaved pipeline", "experts", "delta nets"],
)
def test_other_models_and_topologies_are_planned(flags: list[str], ranks: Ranks) -> None:
    done = run(ranks, "--gpus", "8", *flags, *iterations(1)).check()
    assert "fits" in done.output
