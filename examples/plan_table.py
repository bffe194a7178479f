# SPDX-License-Identifier: Apache-2.0
"""Plans every recipe with `megatron_csbp.dry_run`, and writes the table of README.md.

    python -m examples.plan_table

A test holds the table against the plans. Nothing runs on a GPU: memory and times are modelled.
"""

import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from examples.recipe_models import EXAMPLES, RECIPES, Recipe

README = EXAMPLES / "README.md"
BEGIN = "<!-- Written by `python -m examples.plan_table`; edits are lost. -->"
END = "<!-- End of what `python -m examples.plan_table` writes. -->"
_GIB = 2**30


def plans() -> Iterator[tuple[Recipe, dict[str, Any]]]:
    """Check and plan all recipes in this process, as `dry_run RECIPE --gpus N --json` does."""
    from megatron_csbp import cpu_runtime

    runtime = cpu_runtime.install("cpu")
    from megatron_csbp import megatron_compat
    from megatron_csbp.tools.dry_run.as_json import plan_json
    from megatron_csbp.tools.dry_run.checked_job import check_job
    from megatron_csbp.tools.dry_run.plan import Cluster, make_plan
    from megatron_csbp.tools.dry_run.tables import read_tables

    megatron_compat.ensure_dataset_helpers()
    cluster = Cluster(read_tables(), "h200", 8)
    for recipe in RECIPES:
        checked = check_job(["--yaml-cfg", str(recipe.path)], recipe.model.gpus, runtime, cluster.node)
        yield recipe, plan_json(make_plan(checked.job, cluster))


def row(recipe: Recipe, plan: Mapping[str, Any]) -> str:
    """Return the line of a recipe."""
    fullest = max(memory["total"] for memory in plan["memory"])
    moved = max(stage["clean"] + stage["corrupted"] for stage in plan["bytes_of_an_iteration"].values())
    time = plan["time"]
    path = recipe.path.relative_to(EXAMPLES)
    fits = "yes" if plan["fits"] else "**no**"
    return (
        f"| [`{path}`]({path}) | {recipe.model.gpus} | {plan['topology']['name']} | {plan['rows']:,} | "
        f"{fullest / _GIB:.0f} GiB | {fits} | {moved / plan['micro_batches'] / _GIB:.1f} GiB | "
        f"{time['seconds']:.0f} s | {100 * time['mfu']:.0f} % |"
    )


def table(rows: list[str]) -> str:
    """Return the whole table with the lines around it."""
    head = (
        "| recipe | H200 | topology | rows on a GPU | memory | fits | exchanged | iteration | MFU |",
        "|---|---|---|---|---|---|---|---|---|",
    )
    return "\n".join([BEGIN, "", *head, *rows, "", END])


def with_table(page: str, rows: list[str]) -> str:
    """Return a page with the table in its place."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + table(rows) + after


def main() -> int:
    """Write the table."""
    logging.disable(logging.WARNING)
    found = [row(recipe, plan) for recipe, plan in plans()]
    Path(README).write_text(with_table(README.read_text(), found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
