# SPDX-License-Identifier: Apache-2.0
"""The plots of a report, from its results alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # no display needed
import matplotlib.pyplot as plt

COLORS = {"CP": "tab:orange", "BP": "tab:green", "CSBP": "tab:blue", "CSBP, contiguous": "tab:cyan"}
CONVERSION = {"autoregressive": "tab:gray", "converted": "tab:blue", "from scratch": "tab:orange"}
DPI = 80


def draw_all(results: dict[str, Any], folder: Path) -> list[str]:
    """Draw what the results allow and return the names of the files, in the order of the report."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, part, draw in (
        ("throughput", "throughput", _throughput),
        ("step-split", "throughput", _step_split),
        ("memory", "memory", _memory),
        ("conversion", "conversion", _conversion),
        ("training", "training", _training),
    ):
        result = results["parts"].get(part, {}).get("result")
        path = folder / f"{name}.png"
        if result is None:
            path.unlink(missing_ok=True)  # an old plot must not stand beside a new "not measured"
            continue
        figure = draw(result)
        figure.tight_layout()
        figure.savefig(path, dpi=DPI, metadata={"Software": None})
        plt.close(figure)
        drawn.append(name)
    return drawn


def groups_of(rows: Sequence[dict[str, Any]]) -> list[tuple[str, int]]:
    """Return the (sweep, ranks) pairs of throughput rows, in order."""
    return list(dict.fromkeys((row["sweep"], row["ranks"]) for row in rows))


def select(rows: Sequence[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    """Return the rows that have these values."""
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def _throughput(result: dict[str, Any]) -> Any:
    """Tokens per second, and the ratio of CSBP to CP, against L."""
    rows = result["rows"]
    swept = [group for group in groups_of(rows) if len({r["sequence_length"] for r in rows if _is(r, group)}) > 1]
    groups = swept or groups_of(rows)[:1]
    figure, axes = plt.subplots(2, len(groups), figsize=(3.6 * len(groups), 5.6), squeeze=False)
    for column, (sweep, ranks) in enumerate(groups):
        for variant in ("CP", "BP", "CSBP"):
            line = select(rows, sweep=sweep, ranks=ranks, variant=variant)
            lengths = [row["sequence_length"] for row in line]
            axes[0][column].semilogx(
                lengths, [row["tokens_per_second"] for row in line], "o-", color=COLORS[variant], label=variant
            )
            baseline = select(rows, sweep=sweep, ranks=ranks, variant="CP")
            ratios = [
                row["tokens_per_second"] / cp["tokens_per_second"] for row, cp in zip(line, baseline, strict=True)
            ]
            axes[1][column].semilogx(lengths, ratios, "o-", color=COLORS[variant], label=variant)
        oversubscribed = ", oversubscribed" if (sweep, ranks) in _oversubscribed(rows) else ""
        axes[0][column].set_title(f"{sweep}, P = {ranks}{oversubscribed}")
        axes[0][column].legend()
        axes[1][column].set_xlabel("clean tokens L")
        for axis in axes[:, column]:
            lengths = sorted({row["sequence_length"] for row in select(rows, sweep=sweep, ranks=ranks)})
            axis.set_xticks(lengths, [str(length) for length in lengths])
            axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
            axis.grid(visible=True, alpha=0.3)
    axes[0][0].set_ylabel("clean tokens per second")
    axes[1][0].set_ylabel("speed relative to CP")
    return figure


def _is(row: dict[str, Any], group: tuple[str, int]) -> bool:
    return (row["sweep"], row["ranks"]) == group


def _oversubscribed(rows: Sequence[dict[str, Any]]) -> set[tuple[str, int]]:
    return {(row["sweep"], row["ranks"]) for row in rows if row["oversubscribed"]}


def _step_split(result: dict[str, Any]) -> Any:
    """Where the step time goes: computation, exposed communication, and what was hidden beside the computation."""
    rows = result["rows"]
    groups = groups_of(rows)
    figure, axes = plt.subplots(1, len(groups), figsize=(2.9 * len(groups), 3.4), squeeze=False)
    for axis, (sweep, ranks) in zip(axes[0], groups, strict=True):
        longest = max(row["sequence_length"] for row in select(rows, sweep=sweep, ranks=ranks))
        bars = select(rows, sweep=sweep, ranks=ranks, sequence_length=longest)
        names = [row["variant"].replace(", ", ",\n").replace("heads at ", "heads\nat ") for row in bars]
        compute = [row["compute_seconds"] for row in bars]
        axis.bar(names, compute, color="tab:gray", label="computation")
        axis.bar(names, [r["exposed_seconds"] for r in bars], bottom=compute, color="tab:red", label="exposed comm.")
        hidden = [row["hidden_seconds"] for row in bars]
        axis.bar(names, hidden, color="none", edgecolor="black", hatch="///", label="hidden comm.")
        axis.set_ylim(0, 1.05 * max(row["step_seconds"] for row in bars))
        axis.set_title(f"{sweep}, P = {ranks}, L = {longest}", fontsize=9)
        axis.tick_params(axis="x", labelsize=8 if len(bars) < 5 else 6)
    axes[0][0].set_ylabel("seconds per step")
    figure.suptitle("gray: computation; red: exposed communication; hatched: hidden behind computation", fontsize=9)
    return figure


def _memory(result: dict[str, Any]) -> Any:
    """Bytes saved for the backward pass, and peak, against L."""
    figure, axes = plt.subplots(1, 2, figsize=(7.6, 3.4))
    for axis, field, title in zip(
        axes, ("saved_bytes", "peak_bytes"), ("saved for backward", "peak of the layer"), strict=True
    ):
        for variant, style in (("CP", "o-"), ("BP", "o-"), ("CSBP", "x--")):
            line = select(result["rows"], variant=variant)
            gibibytes = [row[field] / 2**30 for row in line]
            axis.loglog([r["sequence_length"] for r in line], gibibytes, style, color=COLORS[variant], label=variant)
        axis.set_title(title)
        axis.set_xlabel("clean tokens L")
        axis.grid(visible=True, alpha=0.3)
        axis.legend()
    axes[0].set_ylabel("GiB per rank and layer")
    return figure


def _training(result: dict[str, Any]) -> Any:
    """Validation NELBO against the training clock."""
    figure, axis = plt.subplots(figsize=(5.6, 3.6))
    for run in result["runs"]:
        points = run["validations"]
        seconds = [point["seconds"] for point in points]
        axis.plot(
            seconds, [point["nelbo"] for point in points], "o-", color=COLORS[run["scheme"]], label=run["scheme"]
        )
    axis.set_xlabel("seconds of training")
    axis.set_ylabel("validation NELBO")
    axis.grid(visible=True, alpha=0.3)
    axis.legend()
    return figure


def _conversion(result: dict[str, Any]) -> Any:
    """Draw one panel an objective, with the three trainings on an axis of clean tokens."""
    runs_of, size = result["runs"], result["size"]
    figure, panels = plt.subplots(1, len(runs_of), figsize=(5 * len(runs_of), 4), squeeze=False)
    training = {name: size["autoregressive" if name == "autoregressive" else "diffusion"] for name in CONVERSION}
    before = size["autoregressive"]["iterations"] * size["autoregressive"]["samples"]
    for panel, (objective, runs) in zip(panels[0], runs_of.items(), strict=True):
        for name, color in CONVERSION.items():
            points = sorted((int(iteration), loss) for iteration, loss in runs[name]["validation"].items())
            start = before if name == "converted" else 0
            samples = [start + iteration * training[name]["samples"] for iteration, _ in points]
            tokens = [count * size["sequence_length"] / 1e3 for count in samples]
            panel.plot(tokens, [loss for _, loss in points], "o-", color=color, label=name)
        panel.axhline(result["entropy"], color="black", linestyle="--", linewidth=1, label="single tokens")
        panel.set_title(objective)
        panel.set_xlabel("clean tokens, thousands")
        panel.set_ylabel("validation, nats per token")
        panel.grid(alpha=0.3)
        panel.legend()
    return figure
