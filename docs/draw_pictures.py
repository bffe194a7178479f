# SPDX-License-Identifier: Apache-2.0
"""Draws docs/figures/*.svg from the plans, and the schedule from the order in which the code does things.

.venv/bin/python docs/draw_pictures.py

A test compares the files with what this draws.
"""

import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from docs.svg import Drawing
from megatron_csbp.transformer.geometry.layer_plans import rank_rows
from megatron_csbp.transformer.geometry.plan import plan_attention
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import CLEAN, Scheme, Sharding
from megatron_csbp.transformer.geometry.tiles import KeySource, MaskKind, Tile
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask, dense_mask
from tests.support.recorded_schedule import recorded_schedule

FOLDER = Path(__file__).parent / "figures"
CSBP, BP = Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL, Scheme.BLOCK_PARALLEL
LOCAL, REMOTE, MASKED = "#4878a8", "#e08a2c", "#eeeeee"
RANKS = ("#4878a8", "#e08a2c", "#5aa469", "#b5658c")
TILES = {MaskKind.FULL: "#4878a8", MaskKind.CAUSAL: "#5aa469", MaskKind.ANTICAUSAL: "#b5658c"}
GATHERED, LINK, WAIT = "#e08a2c", "#b5658c", "#bbbbbb"


def mask() -> Drawing:
    """All rows of 8 blocks on 2 ranks against all keys: allowed and on the same rank, allowed and on another."""
    drawing, sample, sharding, cell = Drawing("The mask of 8 blocks on 2 ranks"), Sample(32, 4), Sharding(2, CSBP), 6
    positions, copies = np.tile(np.arange(32), 2), np.repeat([0, CLEAN], 32)
    seen = dense_mask(sample, Mask(CleanAttention.BLOCK_CAUSAL), (positions, copies), (positions, copies))
    owners = [sharding.owner_of(position // (32 // 4)) for position in range(32)]
    for half, name in enumerate(("corrupted keys", "clean keys")):
        drawing.text(80 + (half * 32 + 16) * cell, 14, name, "middle")
    for half, name in enumerate(("corrupted", "clean")):
        drawing.text(70, 24 + (half * 32 + 16) * cell, name, "end")
    for row in range(64):
        cells = [
            MASKED if not seen[row, key] else LOCAL if owners[row % 32] == owners[key % 32] else REMOTE
            for key in range(64)
        ]
        key = 0
        for fill, run in groupby(cells):
            width = len(list(run))
            drawing.rectangle(80 + key * cell, 20 + row * cell, width * cell, cell, fill)
            key += width
    names = {
        "key of the same rank": LOCAL,
        "clean key of the other rank: it crosses the link": REMOTE,
        "masked": MASKED,
    }
    drawing.legend(80, 34 + 64 * cell, names)
    return drawing


def layout() -> Drawing:
    """Which blocks of which copy each of 4 ranks holds, in the order of its rows."""
    drawing, sample, width = Drawing("What each of 4 ranks holds, in the order of its rows"), Sample(16, 1), 22
    y = 16.0
    for title, scheme in (("CSBP: both copies are cut", CSBP), ("pure BP: every rank has the whole clean copy", BP)):
        sharding = Sharding(4, scheme)
        drawing.text(10, y, title)
        for rank in range(4):
            drawing.text(62, y + 23 + 24 * rank, f"rank {rank}", "end")
            for span in rank_rows(sample, sharding, rank).spans:
                for block in range(span.start, span.stop):
                    row = span.first_row + block - span.start
                    fill = RANKS[sharding.owner_of(block // 2)]
                    kind = "clean" if span.copy == CLEAN else "corrupted"
                    drawing.rectangle(70 + row * width, y + 8 + 24 * rank, width, 20, fill, f"{kind} block {block}")
                    name = str(block) if span.copy == CLEAN else f"{block}'"
                    drawing.text(70 + (row + 0.5) * width, y + 22 + 24 * rank, name, "middle", "#ffffff")
        y += 128
    drawing.text(70, y, "7' corrupted block 7, 7 clean block 7; colour: the owner of the block's chunk")
    return drawing


def _problem(drawing: Drawing, tile: Tile, x: float, y: float, scale: float) -> None:
    gathered = tile.key_source is KeySource.GATHERED
    fill = GATHERED if gathered else TILES[tile.mask]
    title = f"{tile.kind}: {tile.query.num_rows} rows x {tile.key.num_rows} keys"
    for rows, keys in zip(tile.query.rows(), tile.key.rows(), strict=True):
        left, right = x + keys[0] * scale, x + (keys[-1] + 1) * scale
        # The rows of a problem may be several runs.
        for run in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
            top, bottom = y + run[0] * scale, y + (run[-1] + 1) * scale
            if tile.mask is MaskKind.FULL:
                drawing.rectangle(left, top, right - left, bottom - top, fill, title)
            else:
                corner = (left, bottom) if tile.mask is MaskKind.CAUSAL else (right, top)
                drawing.triangle([(left, top), corner, (right, bottom)], fill, title)


def tiles() -> Drawing:
    """Every problem of every tile of rank 1 of 4, at its query rows and key rows."""
    drawing, scale = Drawing("The tiles of rank 1 of 4: query rows down, key rows across"), 2.0
    rows = rank_rows(Sample(256, 8), Sharding(4, CSBP), 1)
    plan = plan_attention(rows, Mask(CleanAttention.TOKEN_CAUSAL))
    left, size = 130, rows.num_rows * scale
    right = left + size + 20
    buffer = max(int(tile.key.rows().max()) + 1 for tile in plan.gathered_tiles) * scale
    drawing.text(left + size / 2, 14, "keys of the rank's own rows", "middle")
    drawing.text(right + buffer / 2, 14, "gathered clean keys", "middle")
    drawing.rectangle(left, 20, size, size, MASKED)
    drawing.rectangle(right, 20, buffer, size, MASKED)
    for span in rows.spans:
        kind = "clean" if span.copy == CLEAN else "corrupted"
        drawing.text(left - 6, 24 + (span.first_row + span.length / 2) * scale, f"{kind}, chunk {span.chunk}", "end")
    for tile in plan.tiles:
        _problem(drawing, tile, left if tile.key_source is KeySource.LOCAL else right, 20, scale)
    names = {
        "unmasked, local keys: own blocks, and the staircase of earlier blocks": TILES[MaskKind.FULL],
        "causal triangle, local keys": TILES[MaskKind.CAUSAL],
        "unmasked, gathered keys: most of the work": GATHERED,
    }
    drawing.legend(left, 34 + size, names)
    return drawing


def schedule() -> Drawing:
    """What one rank starts, waits for and computes with two head groups, in the order of the code."""
    drawing = Drawing("What one rank does, in order, with two head groups")
    y = 16.0
    for title, events in recorded_schedule(num_head_groups=2).items():
        drawing.text(10, y, title)
        drawing.text(72, y + 24, "link", "end")
        drawing.text(72, y + 50, "tiles", "end")
        x, under_way = 80.0, None
        for event in events:
            action, _, subject = event.partition(" ")
            if action == "start":
                under_way = (x, subject)
            elif action == "wait":
                assert under_way is not None
                start, what = under_way
                width = max(x - start, 48)
                fill = GATHERED if what == "gather" else LINK
                drawing.rectangle(start, y + 10, width, 22, fill, f"{what} under way")
                drawing.text(start + width / 2, y + 25, what, "middle", "#ffffff")
                x, under_way = start + width + 4, None
            else:
                fill = GATHERED if subject.startswith("gathered") else TILES[MaskKind(subject.split()[-1])]
                drawing.rectangle(x, y + 36, 20, 22, fill, event)
                x += 22
        y += 84
    names = {
        "tile with local keys": TILES[MaskKind.FULL],
        "causal tile with local keys": TILES[MaskKind.CAUSAL],
        "tile with gathered keys; the gather of a head group's keys and values": GATHERED,
        "sum of the gradients of keys and values where they belong": LINK,
    }
    drawing.legend(80, y, names)
    return drawing


PICTURES: dict[str, Callable[[], Drawing]] = {"mask": mask, "layout": layout, "tiles": tiles, "schedule": schedule}


def main() -> None:
    """Write the files."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
