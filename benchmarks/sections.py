# SPDX-License-Identifier: Apache-2.0
"""The sections of RESULTS.md: tables and a plain reading of each, written from the numbers."""

from collections.abc import Callable
from typing import Any

from benchmarks import answers_only, conversion
from benchmarks.section_on_paper import memory, scale, work
from benchmarks.section_throughput import throughput
from benchmarks.text import mebibytes, percent, span, table, thousands


def wire(result: dict[str, Any]) -> list[str]:
    """Formula, ledger and wire."""
    attention = [row for row in result["rows"] if not row["what"].startswith("raw")]
    raw = [row for row in result["rows"] if row["what"].startswith("raw")]
    lines = [
        f"One attention layer, forward and backward, L = {result['sequence_length']}, fp32, each rank in its own "
        "network namespace behind its own veth. Sums over all ranks, MiB. *Wire* is what the interfaces received "
        "without Ethernet, IP and TCP headers (66 bytes for each packet that the interface counted, in the last "
        "column); what is left above the formula is gloo's own protocol.",
        "",
    ]
    lines += _wire_table([row for row in attention if row["formula_bytes"]])
    exchanged = [row for row in attention if row["formula_bytes"]]
    silent = [row for row in attention if not row["formula_bytes"]]
    worst = max(row["worst_wire_error"] for row in exchanged)
    ledger = max(row["worst_ledger_error"] for row in exchanged)
    totals = {
        name: sum(row["wire_received_bytes"] for row in exchanged if row["what"].startswith(f"{name} "))
        for name in ("CP", "CSBP")
    }
    lines += [
        "",
        f"The ledger {'equals the formula exactly' if ledger == 0 else f'is off the formula by {percent(ledger)}'}; "
        f"the wire carries at most {percent(worst, 2)} more or less than the formula on any rank (allowed: "
        f"{percent(result['tolerance'], 0)}). CSBP moves {totals['CSBP'] / totals['CP']:.3f} of CP's bytes, and pure "
        f"BP moves none: at most {max((row['wire_received_bytes'] for row in silent), default=0)} bytes, which are "
        "the barriers around the measurement.",
        "",
        "Calibration: the same counters while one collective moves a known number of bytes.",
        "",
        *_wire_table(raw),
        "",
    ]
    own = [row for row in raw if "own" in row["what"]]
    lines.append(
        f"gloo's own reduce-scatter moves {span([row['wire_to_formula'] for row in own])} times the ideal, so the "
        "exchange does not use it: chunks go by all-to-all and are summed by their owner. Its all-gather and "
        "all-to-all are ideal."
    )
    return lines


def _wire_table(rows: list[dict[str, Any]]) -> list[str]:
    return table(
        ["", "ranks", "formula", "ledger", "wire", "wire / formula", "worst rank off by", "headers"],
        [
            [
                row["what"],
                str(row["ranks"]),
                mebibytes(row["formula_bytes"]),
                mebibytes(row["ledger_bytes"]),
                mebibytes(row["wire_received_bytes"]),
                f"{row['wire_to_formula']:.4f}",
                percent(row["worst_wire_error"], 2),
                mebibytes(row["header_bytes"]),
            ]
            for row in rows
        ],
    )


def attention(result: dict[str, Any]) -> list[str]:
    """The CPU path of the attention."""
    rows = result["rows"]
    header = [
        "L",
        "CSBP s",
        "flash s",
        "CSBP / flash",
        "dispatch",
        "kernel calls",
        "operators",
        "merges",
        "copies",
        "MiB copied",
    ]
    cells = [
        [
            thousands(row["sequence_length"]),
            f"{row['csbp_seconds']:.4f}",
            f"{row['flash_seconds']:.4f}",
            f"{row['to_flash']:.2f}",
            percent(row["dispatch_share"], 2),
            *(str(row[name]) for name in ("kernel_calls", "operator_calls", "merges", "copies")),
            f"{row['copied_bytes'] / 2**20:.1f}",
        ]
        for row in rows
    ]
    longest = rows[-1]
    return [
        "One layer's attention, forward and backward, of one CSBP rank of two, against one plain causal flash "
        "attention with the same number of pairs, on one core and without a network. *dispatch* is the time of the "
        "same schedule with no kernel and next to no data, over the time of the real one: Python, and the overhead "
        "of each operator.",
        "",
        *table(header, cells),
        "",
        f"At L = {thousands(longest['sequence_length'])} the tiles of CSBP take {longest['to_flash']:.2f} times as "
        f"long as plain flash attention (target: 1.35), {_met(longest['to_flash'] <= 1.35)}; planning and dispatch "
        f"take {percent(longest['dispatch_share'], 2)} of the attention (target: 5 % of the step), "
        f"{_met(longest['dispatch_share'] < 0.05)}."
        + (
            f" At L = {thousands(rows[0]['sequence_length'])}, where there is little to compute, they take "
            f"{percent(rows[0]['dispatch_share'])}."
            if len(rows) > 1
            else ""
        ),
    ]


def _met(holds: bool) -> str:
    return "which meets the target" if holds else "**which misses the target**"


def training(result: dict[str, Any]) -> list[str]:
    """The same wall-clock for both."""
    runs = {run["scheme"]: run for run in result["runs"]}
    common = result["common"]
    reached = {scheme: common["reached"][scheme] for scheme in runs}
    pace = {scheme: run["iterations"][-1]["seconds"] / len(run["iterations"]) for scheme, run in runs.items()}
    budget = f"{result['minutes']} minutes each, start included" if result["minutes"] else "no time limit"
    cells = [
        [
            scheme,
            f"{pace[scheme]:.2f}",
            str(reached[scheme]["iterations"]),
            f"{reached[scheme]['iteration']}, at {reached[scheme]['seconds']:.0f} s"
            if "loss" in reached[scheme]
            else "-",
            *(f"{reached[scheme][name]:.4f}" if name in reached[scheme] else "-" for name in ("loss", "nelbo")),
        ]
        for scheme in runs
    ]
    header = ["", "s/iteration", f"iterations in {common['seconds']:.0f} s", "last validated", "loss", "NELBO"]
    lines = [
        "Both train the same small model on Python's standard library through `megatron_csbp.pretrain_gpt` "
        f"(objective `nemotron`), L = {result['sequence_length']}, same data, seed and noise, two ranks, the link of "
        f"*{result['link']}* at {result['bytes_per_second'] / 1e6:.1f} MB/s, {budget} (`--exit-duration-in-mins`). "
        "The clock adds up Megatron's own iteration times, reduction of weight gradients and optimizer included, "
        "and stands still during validation; each validation is of the same held-out text.",
        "",
        *table(header, cells),
        "",
        f"Iteration by iteration the two training losses differ by at most {result['largest_difference']:.1e} "
        f"(relative), so what differs is the pace: CSBP does {pace['CP'] / pace['CSBP']:.2f} times as many "
        "iterations in the same time.",
    ]
    losses = {scheme: point["loss"] for scheme, point in reached.items() if "loss" in point}
    if len(losses) == len(runs):
        better = min(losses, key=lambda scheme: losses[scheme])
        verdict = "Both are equally good" if len(set(losses.values())) == 1 else f"**{better} has the better model**"
        lines.append(
            f"{verdict} by its last validation within the time: loss {losses['CSBP']:.4f} (CSBP) against "
            f"{losses['CP']:.4f} (CP)."
        )
    return lines


SECTIONS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "wire": wire,
    "throughput": throughput,
    "attention": attention,
    "memory": memory,
    "work": work,
    "scale": scale,
    "answers": answers_only.section,
    "conversion": conversion.section,
    "training": training,
}
