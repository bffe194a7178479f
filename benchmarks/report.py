# SPDX-License-Identifier: Apache-2.0
"""RESULTS.md from results.json: no figure in it is typed by hand."""

from pathlib import Path
from typing import Any

from benchmarks.parts import PARTS
from benchmarks.plots import draw_all
from benchmarks.sections import SECTIONS

CAPTIONS = {
    "throughput": "Tokens per second and speed relative to CP against L",
    "step-split": "Step time: computation, exposed and hidden communication",
    "memory": "Bytes saved and peak against L",
    "conversion": "Validation loss against clean tokens, by objective: autoregressive, converted, from scratch",
    "training": "Validation NELBO against training time",
}
PLOTS_OF = {
    "throughput": ("throughput", "step-split"),
    "memory": ("memory",),
    "conversion": ("conversion",),
    "training": ("training",),
}


def write_report(results: dict[str, Any], folder: Path) -> None:
    """Draw the plots and write RESULTS.md.

    Args:
        results: content of results.json.
        folder: where both go.
    """
    drawn = draw_all(results, folder / "plots")
    lines = [*_head(results)]
    for name, part in PARTS.items():
        lines += ["", f"## {part.title}", ""]
        measured = results["parts"].get(name)
        if measured is None:
            lines.append("Not measured in this run.")
        elif "not_measured" in measured:
            lines.append(f"**Not measured**: {measured['not_measured']}.")
        elif "failed" in measured:
            lines += ["**Failed**:", "", "```", measured["failed"].rstrip(), "```"]
        else:
            lines += SECTIONS[name](measured["result"])
            for plot in PLOTS_OF.get(name, ()):
                if plot in drawn:
                    lines += ["", f"![{CAPTIONS[plot]}](plots/{plot}.png)"]
        if measured is not None:
            lines += ["", _provenance(measured)]
    (folder / "RESULTS.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _head(results: dict[str, Any]) -> list[str]:
    machine, versions = results.get("machine", {}), results.get("versions", {})
    lines = ["# Results", ""]
    if results.get("quick"):
        lines += ["**A reduced run, to test the suite: its figures mean nothing.**", ""]
    lines += [
        "Written by `python -m benchmarks.run` (`make bench`) from [results.json](results.json); edits are lost. "
        "Times are medians of runs that alternate between the schemes, and are meant as ratios: CP, BP and CSBP run "
        "the same layers, kernels and overlap side by side. What is modelled says so.",
        "",
        f"- Machine: {machine.get('processor')}, {machine.get('cores')} cores, {machine.get('memory_gib')} GiB, Linux "
        f"{machine.get('kernel')}",
        "- Versions: " + ", ".join(f"{name} {number}" for name, number in versions.items()),
    ]
    return lines


def _provenance(measured: dict[str, Any]) -> str:
    seconds = f", {measured['seconds']:.0f} s" if "seconds" in measured else ""
    return (
        f"<sub>`{measured['command']}`, {measured['date']}{seconds}, load average at start "
        f"{measured['load_average']:.1f}</sub>"
    )
