# SPDX-License-Identifier: Apache-2.0
"""Prints docs/models.md from the tables of families, the recipes and the parity tests.

.venv/bin/python docs/write_models.py > docs/models.md
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from examples.recipe_models import RECIPES
from megatron_csbp.tools.dry_run.tables import read_tables
from megatron_csbp.weights.families import FAMILIES, Family
from tests.functional.test_parity import MODELS, TOPOLOGIES

HEAD = """# Models

What has a table here or a recipe. This page is written by `docs/write_models.py`; a test compares it with the code.
Any other model that Megatron's GPTModel builds can be trained too, by its flags: what a block-diffusion run refuses is
[listed by flag](flags.md#refused), and [what works](support.md) says how far each part is proved.

## Families

Published weights of these come in and go back with `python -m megatron_csbp.weights` ([weights](weights.md)).

| model type | models | layers | norms of queries and keys | objective as published |
|---|---|---|---|---|"""

RECIPE_HEAD = """
## Recipes

Every one passes all checks at its full number of GPUs, and [`examples/`](../examples/README.md) says what each needs.
None has run on a GPU.

| model | layers | hidden | MLP | query heads | parameters | GPUs | files |
|---|---|---|---|---|---|---|---|"""

PARITY_HEAD = """
## Which layers work in which topology

Small networks of each kind train like one rank in these topologies: losses and gradient norms of 20 iterations and
the gradients of every parameter, on CPUs (`tests/functional/test_parity.py`; `make test-all` runs all of them). What
is not in the list may work, and is not held by a test.

| network | topologies |
|---|---|"""

NETWORKS = {
    "nemotron": "grouped-query attention, tied embeddings",
    "block-diffusion": "multi-query attention",
    "deep": "several layers for each pipeline stage",
    "moe": "experts",
    "windows": "sliding windows, every fourth layer without",
    "two views": "two corrupted views",
    "documents": "documents, few active blocks, windows",
    "hybrid": "three gated delta nets to one full attention",
    "hybrid documents": "the same with documents, few active blocks, windows and two views",
}
"""What each model of the parity tests is."""


def family_row(family: Family) -> str:
    """Return the table row of a family."""
    kinds = sorted({str(rule.kind) for rule in family.rules if rule.kind})
    norms = any(rule.megatron.startswith("self_attention.q_layernorm") for rule in family.rules)
    objective = f"`{family.objective}`" if family.objective else "autoregressive"
    return (
        f"| `{family.model_type}` | {family.models} | {', '.join(kinds)} | {'yes' if norms else 'no'} | {objective} |"
    )


def recipe_rows() -> list[str]:
    """Return a table row for each model that has recipes."""
    rows, published = [], read_tables().models.values()
    for model in dict.fromkeys(recipe.model for recipe in RECIPES):
        sizes = (model.layers, model.hidden, model.ffn, model.heads)
        parameters = next(m.parameters for m in published if (m.layers, m.hidden, m.ffn, m.heads) == sizes)
        # Three of four are gated delta nets.
        attending = "" if model.delta_net is None else f" ({model.layers // 4} attend)"
        files = ", ".join(
            f"[{recipe.length}](../examples/{recipe.path.relative_to(recipe.path.parents[1])})"
            for recipe in RECIPES
            if recipe.model == model
        )
        rows.append(
            f"| {model.name} | {model.layers}{attending} | {model.hidden:,} | {model.ffn:,} | {model.heads} | "
            f"{parameters:,} | {model.gpus} | {files} |"
        )
    return rows


def parity_rows() -> list[str]:
    """Return, for each network of the parity tests, the topologies in which it is tried."""
    rows = []
    for name in MODELS:
        topologies = [
            topology.removeprefix("gated delta nets, ") for topology, case in TOPOLOGIES.items() if case.model == name
        ]
        rows.append(f"| {NETWORKS[name]} | {'; '.join(topologies)} |")
    return rows


def page() -> str:
    """Return the whole page."""
    families = [family_row(family) for family in FAMILIES.values()]
    return "\n".join([HEAD, *families, RECIPE_HEAD, *recipe_rows(), PARITY_HEAD, *parity_rows(), ""])


if __name__ == "__main__":
    print(page(), end="")
