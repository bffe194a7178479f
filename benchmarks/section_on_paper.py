# SPDX-License-Identifier: Apache-2.0
"""The sections of RESULTS.md that come from tensors without data and from the planner."""

from typing import Any

from benchmarks.plots import select
from benchmarks.text import gibibytes, percent, span, table, thousands

SHOWN_MODEL = "nemotron-14b"
SHOWN_GROUP_SIZE = 8
HEADLINE_LENGTH = 2**18


def memory(result: dict[str, Any]) -> list[str]:
    """Saved activations and peak."""
    rows = result["rows"]
    lengths = sorted({row["sequence_length"] for row in rows})
    cells = []
    for length in lengths:
        by_variant = {row["variant"]: row for row in select(rows, sequence_length=length)}
        cells.append(
            [thousands(length)]
            + [
                gibibytes(by_variant[variant][field])
                for field in ("saved_bytes", "peak_bytes")
                for variant in ("CP", "BP", "CSBP")
            ]
        )
    pairs = [
        (select(rows, sequence_length=n, variant="CSBP")[0], select(rows, sequence_length=n, variant=other)[0])
        for other in ("CP", "BP")
        for n in lengths
    ]
    against_cp, against_bp = pairs[: len(lengths)], pairs[len(lengths) :]
    never_above = all(ours[field] <= cp[field] for ours, cp in against_cp for field in ("saved_bytes", "peak_bytes"))
    grouped, at_once = (
        select(rows, sequence_length=lengths[-1], variant=f"CSBP{how}")[0] for how in ("", ", heads at once")
    )
    growth = [bp["saved_bytes"] / ours["saved_bytes"] for ours, bp in against_bp]
    peaks = [ours["peak_bytes"] / cp["peak_bytes"] for ours, cp in against_cp]
    return [
        f"One attention layer with the heads of {result['model']}, one of {result['group_size']} ranks, bf16, "
        "counted on tensors without data: what autograd saves, and the most that is alive at once in forward and "
        "backward (inputs apart; what a kernel allocates inside is not seen). Heads are exchanged in as many groups "
        "as training chooses for such sizes. GiB.",
        "",
        *table(["L", "saved CP", "saved BP", "saved CSBP", "peak CP", "peak BP", "peak CSBP"], cells),
        "",
        f"CSBP is {'never' if never_above else '**sometimes**'} above CP: it saves the same and peaks at "
        f"{span(peaks)} of CP's. Pure BP saves {span(growth)} times as much as CSBP, since every rank holds the "
        "whole clean copy. What is saved holds no gathered keys, and from L = 32K on the largest tensor has less "
        "than L x L elements (checked).",
        f"At L = {thousands(lengths[-1])} CSBP's {grouped['head_groups']} head groups lower its peak from "
        f"{gibibytes(at_once['peak_bytes'])} GiB, with all heads at once, to {gibibytes(grouped['peak_bytes'])}.",
    ]


def work(result: dict[str, Any]) -> list[str]:
    """Pairs computed and balance."""
    rows = result["rows"]
    blocks = sorted({row["blocks_per_chunk"] for row in rows})
    kinds = list(dict.fromkeys((row["variant"], row["clean_attention"]) for row in rows))
    cells = [
        [
            f"{variant}, {clean}",
            *(
                f"{row['executed_to_allowed']:.2f} / {row['max_to_min']:.2f}"
                for count in blocks
                for row in select(rows, variant=variant, clean_attention=clean, blocks_per_chunk=count)
            ),
        ]
        for variant, clean in kinds
    ]
    ours = [row for row in rows if row["variant"] == "CSBP"]
    contiguous = [row for row in rows if row["variant"] == "CSBP, contiguous"]
    replicated = [row for row in rows if row["variant"] == "BP"]
    waste = max(row["executed_to_allowed"] for row in ours if row["blocks_per_chunk"] >= 4)
    return [
        f"Query-key pairs of the kernel calls that really happen on {result['group_size']} ranks, over the pairs "
        "that the mask allows; and the busiest rank's pairs over the least busy one's. By blocks in a chunk.",
        "",
        *table(["computed over allowed / busiest over least busy", *map(str, blocks)], cells),
        "",
        f"CSBP computes at most {waste:.4f} times the allowed pairs with four or more blocks a chunk (target: 1.02). "
        f"Dual-end is balanced to {span([row['max_to_min'] for row in ours], '.3f')}, contiguous to "
        f"{span([row['max_to_min'] for row in contiguous])}. Pure BP computes "
        f"{span([row['executed_to_allowed'] for row in replicated])} times the allowed pairs: the clean copy on "
        "every rank.",
    ]


def scale(result: dict[str, Any]) -> list[str]:
    """The planner's figures."""
    rows = [row for row in result["rows"] if row["model"] == SHOWN_MODEL and row["group_size"] == SHOWN_GROUP_SIZE]
    cells = [
        [
            f"{thousands(row['sequence_length'])} {row['scheme']}",
            str(row["rows"]),
            gibibytes(row["remote_bytes"]),
            f"{row['attention_flops'] / 1e15:.2f}",
            f"{row['linear_flops'] / 1e15:.2f}",
            f"{row['imbalance']:.4f}",
            f"{row['modelled_compute_seconds']:.1f}",
            f"{row['modelled_nvlink_seconds']:.2f}",
            f"{row['modelled_network_seconds']:.2f}",
        ]
        for row in rows
    ]
    header = ["L", "rows", "GiB received", "attention PFLOP", "linear PFLOP", "busiest / least busy"]
    header += ["compute s", "NVLink s", "network s"]
    return [
        f"{SHOWN_MODEL}, P = {SHOWN_GROUP_SIZE}, bf16, token-causal clean attention, per rank and training step of "
        "one sequence. Nothing is run; rows, bytes, operations and balance are the planner's. All "
        f"{len(result['rows'])} plans (3B, 8B, 14B; further L and P) are in results.json.",
        "",
        *table(header, cells),
        "",
        *_headline(rows),
        f"Planning took at most {result['slowest_plan_seconds'] * 1000:.1f} ms for a rank (target at L = 1M, P = 64: "
        "below 1 s).",
        "",
        "The last three columns are **modelled, not measured**: operations over a published rate of an H200, bytes "
        "over the nominal rate of NVLink and of one 400 Gbit/s port, with nothing hidden.",
        *_modelled_reading(rows),
    ]


def _headline(rows: list[dict[str, Any]]) -> list[str]:
    moved = {row["scheme"]: row for row in rows if row["sequence_length"] == HEADLINE_LENGTH}
    if not moved:
        return []
    return [
        f"At {thousands(HEADLINE_LENGTH)} the plan moves {gibibytes(moved['CSBP']['remote_bytes'])} GiB for CSBP and "
        f"{gibibytes(moved['CP']['remote_bytes'])} GiB for CP."
    ]


def _modelled_reading(rows: list[dict[str, Any]]) -> list[str]:
    by_scheme = {row["scheme"]: row for row in rows if row["sequence_length"] == HEADLINE_LENGTH}
    if not by_scheme:
        return []
    cp, csbp = by_scheme["CP"], by_scheme["CSBP"]
    gains = {
        link: (cp["modelled_compute_seconds"] + cp[field]) / (csbp["modelled_compute_seconds"] + csbp[field]) - 1
        for link, field in (("NVLink", "modelled_nvlink_seconds"), ("the network", "modelled_network_seconds"))
    }
    return [
        f"Against a CP baseline with the same kernels and no overlap at all, halving the traffic would make a step at "
        f"{thousands(HEADLINE_LENGTH)} faster by at most "
        + " and ".join(f"{percent(gain)} over {link}" for link, gain in gains.items())
        + "; more than that must come from kernels, copies and mask shape, or from layers with a sliding window."
    ]
