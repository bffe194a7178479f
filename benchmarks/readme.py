# SPDX-License-Identifier: Apache-2.0
"""The figures of README.md, between two comments: written from results.json, like the report."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.plots import groups_of, select
from benchmarks.text import mebibytes, percent, span, table

README = Path(__file__).parents[1] / "README.md"
BEGIN = "<!-- Written by `make bench` from benchmarks/results.json; edits are lost. -->"
_PLOTS = {"throughput": "Clean tokens per second, and relative to CP, against L"}
_LINKS = {"Across nodes": "across nodes", "NVLink": "of NVLink"}
END = "<!-- End of what `make bench` writes. -->"


def update_readme(results: dict[str, Any], readme: Path = README) -> None:
    """Replace the figures between the two comments.

    Args:
        results: content of results.json.
        readme: the page.
    """
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    block = "\n".join([BEGIN, "", *figures(results), "", END])
    readme.write_text(f"{before}{block}{after}", encoding="utf-8")


def figures(results: dict[str, Any]) -> list[str]:
    """Return a table of what matters, as far as it was measured.

    Args:
        results: content of results.json.
    """
    machine, rows = results["machine"], []
    for part, write in _ROWS.items():
        if (result := results["parts"].get(part, {}).get("result")) is not None:
            rows += write(result)
    return [
        f"On {machine['cores']} cores ({machine['processor']}), each rank in a network namespace of its own, on links "
        "slowed so that a core stands to its link as an H200 to its own:",
        "",
        *table(["", "CP", "CSBP", "CSBP / CP"], rows),
        "",
        *(
            f"![{caption}](benchmarks/plots/{part}.png)"
            for part, caption in _PLOTS.items()
            if "result" in results["parts"].get(part, {})
        ),
        "",
        "[Everything measured, read plainly](benchmarks/RESULTS.md).",
    ]


def _wire(result: dict[str, Any]) -> list[list[str]]:
    ranks = max(row["ranks"] for row in result["rows"])
    of_ranks = select(result["rows"], ranks=ranks)
    received = {
        name: sum(
            row["wire_received_bytes"] for row in of_ranks if row["what"] in (f"{name} forward", f"{name} backward")
        )
        for name in ("CP", "CSBP")
    }
    worst = max(row["worst_wire_error"] for row in result["rows"] if row["what"].split()[0] in received)
    what = f"MiB on the wire, a layer, {ranks} ranks (within {percent(worst, 2)} of the closed form)"
    ratio = f"{received['CSBP'] / received['CP']:.3f}"
    return [[what, mebibytes(received["CP"]), mebibytes(received["CSBP"]), ratio]]


def _throughput(result: dict[str, Any]) -> list[list[str]]:
    lines = []
    for sweep, ranks in groups_of(result["rows"]):
        group = select(result["rows"], sweep=sweep, ranks=ranks)
        lengths = sorted({row["sequence_length"] for row in group})
        if sweep not in _LINKS:
            continue
        speeds = {name: [row["tokens_per_second"] for row in select(group, variant=name)] for name in ("CP", "CSBP")}
        ratios = [fast / slow for fast, slow in zip(speeds["CSBP"], speeds["CP"], strict=True)]
        shared = ", which share cores" if group[0]["oversubscribed"] else ""
        what = f"clean tokens/s, links as {_LINKS[sweep]}, {ranks} ranks{shared}, L = {lengths[0]} to {lengths[-1]}"
        lines.append([what, *(span(sorted(speeds[name]), ".0f") for name in ("CP", "CSBP")), span(ratios)])
    return lines


def _training(result: dict[str, Any]) -> list[list[str]]:
    reached = result["common"]["reached"]
    if not all("loss" in reached[scheme] for scheme in ("CP", "CSBP")):
        return []
    seconds = f"{result['common']['seconds']:.0f} s"
    counts = [reached[scheme]["iterations"] for scheme in ("CP", "CSBP")]
    losses = [reached[scheme]["loss"] for scheme in ("CP", "CSBP")]
    return [
        [f"iterations of one training run in {seconds}", *map(str, counts), f"{counts[1] / counts[0]:.2f}"],
        [
            "its last validation loss by then (at "
            + " and ".join(f"{reached[scheme]['seconds']:.0f} s" for scheme in ("CP", "CSBP"))
            + ")",
            *(f"{loss:.3f}" for loss in losses),
            "",
        ],
    ]


_ROWS: dict[str, Callable[[dict[str, Any]], list[list[str]]]] = {
    "wire": _wire,
    "throughput": _throughput,
    "training": _training,
}
