# SPDX-License-Identifier: Apache-2.0
"""The sections of RESULTS.md: tables and a plain reading of each, written from the numbers."""

from collections.abc import Callable
from typing import Any

from benchmarks.plots import groups_of, select
from benchmarks.section_on_paper import memory, scale, work
from benchmarks.text import mebibytes, percent, span, table, thousands, trend


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


def throughput(result: dict[str, Any]) -> list[str]:
    """Tokens per second side by side."""
    shape, rows = result["shape"], result["rows"]
    lines = [
        f"{shape['num_layers']} transformer layers (hidden {shape['hidden']}, {shape['num_heads']} query and "
        f"{shape['num_key_value_heads']} key/value heads of {shape['head_dim']}, MLP {shape['ffn']}, block "
        f"{shape['block_size']}, {shape['clean_attention']} clean attention, fp32) around the real attention, driven "
        "directly: no embedding, vocabulary, optimizer or reduction of weight gradients. One rank a core, pinned. A "
        "step is one forward and one backward pass of one sequence; its time is that of the slowest rank.",
        "",
        "Links are slowed with `tc tbf` so that a core stands to its link as an H200 to its own: bytes per second "
        "here = bytes per second there x (measured FLOP/s of attention on one core / "
        f"{result['h200_attention_flops'] / 1e12:.0f} TFLOP/s) x (4 bytes an element here / "
        f"{result['h200_itemsize']} there). The H200 figure is published, not measured.",
        "",
        *_links_table(result["links"]),
    ]
    for sweep, ranks in groups_of(rows):
        group = select(rows, sweep=sweep, ranks=ranks)
        label = " (oversubscribed: ranks share cores, so only ratios count)" if group[0]["oversubscribed"] else ""
        lines += ["", f"### {sweep}, P = {ranks}{label}", "", *_throughput_table(group), "", *_read_throughput(group)]
    lines += [
        "",
        "*exposed* is the time that the computing thread was blocked on the network (mean over ranks), *network "
        "alone* the time of the same exchanges with nothing computed beside them, *hidden* the part of it that was "
        "not exposed.",
    ]
    return lines


def _links_table(links: list[dict[str, Any]]) -> list[str]:
    rows = []
    for link in links:
        limited = link["bytes_per_second"] is not None
        rows.append(
            [
                link["link"],
                str(link["ranks"]),
                f"{link['cluster_bytes_per_second'] / 1e9:.0f} GB/s" if limited else "-",
                f"{link['core_flops'] / 1e9:.1f} GFLOP/s",
                f"{link['bytes_per_second'] / 1e6:.1f} MB/s" if limited else "as fast as the kernel",
            ]
        )
    return table(["link", "ranks", "an H200's link", "a core here", "link here"], rows)


def _throughput_table(group: list[dict[str, Any]]) -> list[str]:
    rows = []
    for row in group:
        cp = select(group, variant="CP", sequence_length=row["sequence_length"])[0]
        rows.append(
            [
                thousands(row["sequence_length"]),
                row["variant"],
                f"{row['tokens_per_second']:.0f}",
                f"{row['tokens_per_second'] / cp['tokens_per_second']:.2f}",
                *(
                    f"{row[f'{name}_seconds']:.2f}"
                    for name in ("step", "compute", "exposed", "hidden", "network_alone")
                ),
            ]
        )
    header = ["L", "", "tokens/s", "vs CP", "step s", "compute s", "exposed s", "hidden s", "network alone s"]
    return table(header, rows)


def _read_throughput(group: list[dict[str, Any]]) -> list[str]:
    """Say what a group of rows shows, whatever it is."""
    lengths = sorted({row["sequence_length"] for row in group})

    def ratios(fast: str, slow: str) -> list[float]:
        """Return how many times as fast one variant is as another, by length."""
        steps = ([r["step_seconds"] for r in select(group, variant=variant)] for variant in (slow, fast))
        return [slower / faster for slower, faster in zip(*steps, strict=True)]

    csbp = ratios("CSBP", "CP")
    sentence = f"CSBP runs at {span(csbp)} times the speed of CP"
    if len(lengths) > 1:
        sentence += f"; with L the ratio {trend(csbp)}"
    slower = [thousands(length) for length, ratio in zip(lengths, csbp, strict=True) if ratio < 1]
    sentence += f". **CSBP is slower than CP at L = {', '.join(slower)}.**" if slower else "."
    if trend(csbp) == "falls":
        sentence += (
            " It falls because computation grows with L squared and bytes with L, while both schemes compute the same "
            "with the same kernels: the longer the sequence, the less a link of given speed matters."
        )
    lines = [sentence]
    if select(group, variant="BP"):
        lines.append(f"Pure BP runs at {span(ratios('BP', 'CP'))} times the speed of CP.")
    if select(group, variant="CSBP, contiguous"):
        lines.append(
            f"Dual-end assignment is {span(ratios('CSBP', 'CSBP, contiguous'))} times as fast as contiguous (the "
            "paper: 1.28 to 1.34 at 256K on eight and four ranks)."
        )
    if select(group, variant="CSBP, heads at once"):
        gains = [span(ratios(scheme, f"{scheme}, heads at once")) for scheme in ("CP", "CSBP")]
        lines.append(
            f"Exchanging heads in groups makes CP {gains[0]} and CSBP {gains[1]} times as fast as all heads at once."
        )
    spread = max((max(row["step_seconds_all"]) - min(row["step_seconds_all"])) / row["step_seconds"] for row in group)
    return [*lines, f"Repeats of one step differ by up to {percent(spread, 0)}."]


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
        f"{_met(longest['dispatch_share'] < 0.05)}.",
    ]


def _met(holds: bool) -> str:
    return "which meets the target" if holds else "**which misses the target**"


def training(result: dict[str, Any]) -> list[str]:
    """The same wall-clock for both."""
    cp, csbp = (next(run for run in result["runs"] if run["scheme"] == scheme) for scheme in ("CP", "CSBP"))
    common = result["common"]
    budget = f"{result['minutes']} minutes each, start included" if result["minutes"] else "no time limit"
    rows = []
    for run in (cp, csbp):
        reached = common["reached"][run["scheme"]]
        per_iteration = run["iterations"][-1]["seconds"] / len(run["iterations"])
        bound = [f"{reached['nelbo']:.4f}", str(reached["iteration"])] if "nelbo" in reached else ["-", "-"]
        rows.append([run["scheme"], f"{per_iteration:.2f}", str(reached["iterations"]), *bound])
    lines = [
        "Both train the same small model on Python's standard library through `megatron_csbp.pretrain_gpt`, L = "
        f"{result['sequence_length']}, same data, seed and noise, two ranks, the link of *{result['link']}* at "
        f"{result['bytes_per_second'] / 1e6:.1f} MB/s, {budget} (`--exit-duration-in-mins`). The clock adds up "
        "Megatron's own iteration times, reduction of weight gradients and optimizer included, and stands still "
        "during validation.",
        "",
        *table(
            ["", "s/iteration", f"iterations in {common['seconds']:.0f} s", "validation NELBO", "at iteration"], rows
        ),
        "",
    ]
    pace = (cp["iterations"][-1]["seconds"] / len(cp["iterations"])) / (
        csbp["iterations"][-1]["seconds"] / len(csbp["iterations"])
    )
    lines.append(
        f"Iteration by iteration the two training losses differ by at most {result['largest_difference']:.1e} "
        f"(relative), so what differs is the pace: CSBP does {pace:.2f} times as many iterations in the same time."
    )
    bounds = [common["reached"][scheme].get("nelbo") for scheme in ("CP", "CSBP")]
    if None not in bounds:
        better = "CSBP" if bounds[1] < bounds[0] else "CP"
        verdict = "Both models are equally good" if bounds[0] == bounds[1] else f"**{better}'s model is better**"
        lines.append(
            f"{verdict} when the time is over: validation bound {bounds[1]:.4f} (CSBP) against {bounds[0]:.4f} (CP)."
        )
    return lines


SECTIONS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "wire": wire,
    "throughput": throughput,
    "attention": attention,
    "memory": memory,
    "work": work,
    "scale": scale,
    "training": training,
}
