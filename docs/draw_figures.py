# SPDX-License-Identifier: Apache-2.0
"""Draws the figures of the pages from the plans that training uses.

.venv/bin/python docs/draw_figures.py --write

replaces what stands between `<!-- figure: NAME -->` and `<!-- end -->` in the pages. A test compares them.
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megatron_csbp.transformer.geometry.layer_plans import rank_rows
from megatron_csbp.transformer.geometry.plan import plan_attention
from megatron_csbp.transformer.geometry.sample import Sample, active_from_blocks, packed_documents
from megatron_csbp.transformer.geometry.scheme import CLEAN, Scheme, Sharding
from megatron_csbp.transformer.geometry.transfers import row_bytes
from megatron_csbp.transformer.geometry.visibility import (
    CleanAttention,
    Mask,
    WindowAnchor,
    allowed_pairs,
    dense_mask,
)

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "docs" / "design.md", ROOT / "docs" / "parallelism.md"]
CSBP = Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL
GIB = 2**30


def mask_of_ranks() -> list[str]:
    """4 blocks on 2 ranks: who sees whom, and whether that key is a row of the same rank."""
    sample, sharding = Sample(4, 1), Sharding(2, CSBP)
    owners = [sharding.owner_of(block) for block in range(4)]
    positions, copies = np.tile(np.arange(4), 2), np.repeat([0, CLEAN], 4)
    seen = dense_mask(sample, Mask(CleanAttention.BLOCK_CAUSAL), (positions, copies), (positions, copies))
    remarks = {
        1: "No R under corrupted keys: they, and",
        2: "their gradients, never leave a rank.",
        4: "Rank r owns chunks r and 2P-1-r of both",
        5: "copies, which balances the work (the",
        6: "paper's dual-end assignment, and at once",
        7: "Megatron's zigzag).",
    }
    lines = [
        "4 blocks, 2 ranks; rows attend to columns.  L: key of the same rank   R: key of the other rank   .: masked",
        "",
        "                       corrupted keys          clean keys",
        "                       0    1    2    3        0    1    2    3",
    ]
    for row in range(8):
        name = {0: "corrupted", 4: "clean"}.get(row, "")
        cells = ["." if not seen[row, key] else "L" if owners[key % 4] == owners[row % 4] else "R" for key in range(8)]
        keys = "    ".join(cells[:4]) + "        " + "    ".join(cells[4:])
        line = f"{name:<10}{row % 4}  rank {owners[row % 4]}    {keys}"
        lines.append(f"{line:<68}{remarks[row]}" if row in remarks else line)
    return lines


def rows_of_ranks() -> list[str]:
    """What each of two ranks holds: static; two views; and a packed sample with few active blocks."""
    lines: list[str] = []
    sharding = Sharding(2, CSBP)
    documents = packed_documents([5, 3, 7, 8, 4], 2)
    few = active_from_blocks([[1, 2, 9, 10, 11]], 16)
    for title, sample in (
        ("one document of 8 blocks", Sample(8, 1)),
        ("the same with two views", Sample(8, 1, 2)),
        ("5 documents in 16 blocks of 2, 5 blocks active", Sample(32, 2, 1, documents, few)),
    ):
        lines.append(f"{title}:")
        for rank in range(2):
            rows = rank_rows(sample, sharding, rank)
            spans = [
                f"{'clean' if span.copy == CLEAN else f'view {span.copy}'} {span.start}-{span.stop - 1}"
                for span in rows.spans
            ]
            lines.append(f"    rank {rank}: {' | '.join(spans)}")
    return lines


def tiles_of_a_rank() -> list[str]:
    """The tiles of one rank with and without a window."""
    lines: list[str] = []
    rows = rank_rows(Sample(4096, 32), Sharding(4, CSBP), 1)
    for title, window in (("no window", None), ("window of 256", 256)):
        plan = plan_attention(rows, Mask(CleanAttention.TOKEN_CAUSAL, window))
        lines.append(f"L 4096, M 32, rank 1 of 4, {title}: {plan.clean.lowering}, {plan.num_pairs:,} pairs")
        for tile in plan.tiles:
            shape = f"{tile.query.num_rows} x {tile.key.num_rows}"
            first = ", writes first" if tile.writes_first else ""
            lines.append(
                f"    {tile.key_source:<9} {tile.mask:<11} {tile.query.num_problems:>4} problems of {shape:<12}{first}"
            )
    return lines


def bytes_of_layers() -> list[str]:
    """Traffic of full and of window layers."""
    length, size = 262_144, 8
    sample = Sample(length, 32)
    lines = ["256K tokens, 8 ranks, K 8, D 128, bf16, a layer; one gather, mean over the ranks:"]
    full = None
    for title, mask in (
        ("full attention", Mask(CleanAttention.TOKEN_CAUSAL)),
        ("window of 4,096", Mask(CleanAttention.TOKEN_CAUSAL, 4096)),
        ("window of 1,024", Mask(CleanAttention.TOKEN_CAUSAL, 1024, WindowAnchor.BLOCK)),
    ):
        plans = [plan_attention(rank_rows(sample, Sharding(size, CSBP), rank), mask) for rank in range(size)]
        moved = sum(plan.clean.gather_bytes(row_bytes(8, 128, 2)) for plan in plans) / size
        pairs = allowed_pairs(sample, mask)
        full = full or (moved, pairs)
        lines.append(
            f"    {title:<16} {plans[1].clean.lowering:<11} {moved / 2**20:>8.1f} MiB   {pairs / 1e9:>7.3f} G pairs"
            f"   {moved / full[0]:.4f} and {pairs / full[1]:.4f} of full"
        )
    return lines


def bytes_of_schemes() -> list[str]:
    """Traffic of a layer under each scheme, by the size of the context group."""
    length, layer = 262_144, row_bytes(8, 128, 2)
    lines = [
        "256K tokens, M 32, K 8, D 128, bf16: GiB that a rank receives for a layer and sequence, forward and backward",
        "ranks         CP      CSBP    pure BP",
    ]
    for size in (2, 4, 8, 16, 32):
        moved = []
        for scheme in (Scheme.CONTEXT_PARALLEL, CSBP, Scheme.BLOCK_PARALLEL):
            plan = plan_attention(
                rank_rows(Sample(length, 32), Sharding(size, scheme), 0), Mask(CleanAttention.TOKEN_CAUSAL)
            )
            moved.append(3 * sum(transfer.gather_bytes(layer) for _, transfer in plan.transfers) / GIB)
        lines.append(f"{size:>5}   {moved[0]:>8.3f}  {moved[1]:>8.3f}   {moved[2]:>8.3f}")
    return lines


FIGURES: dict[str, Callable[[], list[str]]] = {
    "mask": mask_of_ranks,
    "rows": rows_of_ranks,
    "tiles": tiles_of_a_rank,
    "bytes": bytes_of_layers,
    "schemes": bytes_of_schemes,
}


def with_figures(text: str) -> str:
    """Return a page with its figures drawn anew."""

    def drawn(match: re.Match[str]) -> str:
        lines = "\n".join(line.rstrip() for line in FIGURES[match.group(1)]())
        return f"<!-- figure: {match.group(1)} -->\n\n```text\n{lines}\n```\n\n<!-- end -->"

    return re.sub(r"<!-- figure: (\w+) -->.*?<!-- end -->", drawn, text, flags=re.DOTALL)


def main() -> None:
    """Write the pages, or print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="Replace the figures in the pages.")
    if parser.parse_args().write:
        for page in PAGES:
            page.write_text(with_figures(page.read_text()))
        return
    for name, draw in FIGURES.items():
        print(f"{name}\n" + "\n".join(draw()) + "\n")


if __name__ == "__main__":
    main()
