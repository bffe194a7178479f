# SPDX-License-Identifier: Apache-2.0
"""Converting an autoregressive model against training from scratch, by objective, with the model of the demo."""

import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.text import table
from megatron_csbp.objectives import OBJECTIVES

DEMO = Path(__file__).parents[1] / "examples" / "demo"
NATS = ".3f"


def measure(folder: Path, size_name: str) -> dict[str, Any]:
    """Train one autoregressive model, convert it with every objective, and train from scratch beside each.

    Args:
        folder: for all files.
        size_name: "full" or "quick", as of the demo.
    """
    sys.path.insert(0, str(DEMO))  # the demo's files import each other by their bare names
    demo, sizes = import_module("run"), import_module("sizes")
    size = sizes.SIZES[size_name]
    data, entropy = demo.prepare_data(folder, size)
    autoregressive = demo.train_autoregressive(size, data, folder)
    runs = {}
    for objective in OBJECTIVES:
        output = folder / objective
        output.mkdir()
        (output / "autoregressive").symlink_to(folder / "autoregressive")
        flags = [*data, "--diffusion-objective", objective]
        runs[objective] = {"autoregressive": asdict(autoregressive)} | {
            name: asdict(demo.diffuse(name, sizes.NUM_RANKS, size, flags, output))
            for name in ("converted", "from scratch")
        }
    return {"entropy": entropy, "size": asdict(size), "runs": runs}


def section(result: dict[str, Any]) -> list[str]:
    """Return the lines of the report."""
    size, rows = result["size"], []
    for objective, runs in result["runs"].items():
        converted, scratch = runs["converted"], runs["from scratch"]
        rows.append(
            [
                f"`{objective}`",
                *(f"{_first(run['losses']):{NATS}}" for run in (converted, scratch)),
                f"{_first(converted['grad_norms']):.1f}",
                *(f"{_last(run['validation']):{NATS}}" for run in (converted, scratch)),
            ]
        )
    autoregressive = next(iter(result["runs"].values()))["autoregressive"]
    return [
        f"`examples/demo/run.py --objective ...`: a model of {size['layers']} layers and hidden size "
        f"{size['hidden']}, {size['autoregressive']['iterations']} iterations of next-token training on Python "
        "sources (validation "
        f"{_last(autoregressive['validation']):{NATS}} nats/token; entropy of single tokens "
        f"{result['entropy']:{NATS}}), then {size['diffusion']['iterations']} iterations with blocks of "
        f"{size['block_size']}, with CSBP on two ranks, from these weights (*converted*) and from random ones "
        "(*scratch*). NELBO on a text that was held out. The training losses of different objectives weigh tokens "
        "differently: compare within a line.",
        "",
        *table(
            [
                "objective",
                "first loss, converted",
                "scratch",
                "first grad norm, converted",
                "NELBO at the end, converted",
                "scratch",
            ],
            rows,
        ),
    ]


def _first(values: dict[int, float]) -> float:
    return values[min(values, key=int)]


def _last(values: dict[int, float]) -> float:
    return values[max(values, key=int)]
