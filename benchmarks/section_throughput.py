# SPDX-License-Identifier: Apache-2.0
"""The section of RESULTS.md on throughput over slow links."""

from typing import Any

from benchmarks.plots import groups_of, select
from benchmarks.text import percent, span, table, thousands, trend


def throughput(result: dict[str, Any]) -> list[str]:
    """Tokens per second side by side."""
    shape, rows = result["shape"], result["rows"]
    lines = [
        f"{shape['num_layers']} transformer layers (hidden {shape['hidden']}, {shape['num_heads']} query and "
        f"{shape['num_key_value_heads']} key/value heads of {shape['head_dim']}, MLP {shape['ffn']}, block "
        f"{shape['block_size']}, {shape['clean_attention']} clean attention, fp32) around the real attention, driven "
        "directly: no embedding, vocabulary, optimizer or reduction of weight gradients. One rank a core, pinned. A "
        "step is one forward and one backward pass of one sequence; its time is that of the slowest rank. CP sends "
        "the corrupted copy as well, and waits for it last, since nothing reads it; context parallelism that does not "
        "know the mask would need it before its first tile.",
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
        *_read_growth(rows),
        "",
        "*exposed* is the time that the computing thread was blocked on the network (mean over ranks), *network "
        "alone* the time of the same exchanges with nothing computed beside them, *hidden* the part of it that was "
        "not exposed. The network stack runs on the cores that compute, so here CP's extra bytes cost something on "
        "the fastest link too, most of all in short steps; copies over NVLink or by a network card would not.",
    ]
    return lines


def _links_table(links: list[dict[str, Any]]) -> list[str]:
    rows = []
    for link in links:
        limited = link["bytes_per_second"] is not None
        rows.append(
            [
                f"{link['link']} ({link['sweep']})",
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
    sentence += "." + _read_slower(group, [length for length, ratio in zip(lengths, csbp, strict=True) if ratio < 1])
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


def _read_slower(group: list[dict[str, Any]], lengths: list[int]) -> str:
    """Say at which of these lengths, where CSBP's median step is the longer one, that is more than noise."""
    said = ""
    for length in lengths:
        cp, csbp = (
            select(group, variant=name, sequence_length=length)[0]["step_seconds_all"] for name in ("CP", "CSBP")
        )
        if min(csbp) > max(cp):
            said += f" **CSBP is slower than CP at L = {thousands(length)}.**"
        else:
            said += f" At L = {thousands(length)} the two differ by less than the repeats of one step."
    return said


def _read_growth(rows: list[dict[str, Any]]) -> list[str]:
    """Say how CSBP's advantage changes with more ranks: for one sequence, and for as many tokens a rank."""
    speed = {
        (row["sweep"], row["ranks"], row["sequence_length"], row["variant"]): row["tokens_per_second"] for row in rows
    }
    ratios = {key[:3]: speed[(*key[:3], "CSBP")] / speed[(*key[:3], "CP")] for key in speed}
    lines = []
    for growth, factor in (("at the same L", 1), ("with the same L/P, which is how the paper's runs grow", 2)):
        pairs = {
            (few, many): (ratios[few], ratios[many])
            for few in ratios
            for many in ratios
            if few[0] == many[0] and many[1] == 2 * few[1] and many[2] == factor * few[2]
        }
        if pairs:
            steps = ", ".join(
                f"{before:.2f} at L = {thousands(few[2])} to {after:.2f} at L = {thousands(many[2])}"
                for (few, many), (before, after) in pairs.items()
            )
            words = {trend(pair) for pair in pairs.values()}
            verdict = words.pop() if len(words) == 1 else "does not change in one direction"
            ranks = sorted({key[1] for pair in pairs for key in pair})
            lines.append(
                f"From P = {ranks[0]} to {ranks[-1]} {growth}, CSBP's speed relative to CP {verdict}: {steps}."
            )
    if any(row["oversubscribed"] for row in rows) and lines:
        lines.append(
            "Where ranks share cores, a rank whose neighbour waits for the network computes faster than its link was "
            "scaled for, so part of this growth is of this machine."
        )
    return ["", *lines] if lines else []
