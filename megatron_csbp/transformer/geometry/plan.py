# SPDX-License-Identifier: Apache-2.0
"""What one rank computes and exchanges in an attention layer: tiles and transfers of one mask. Pure."""

from dataclasses import dataclass, replace
from functools import cached_property

from megatron_csbp.transformer.geometry.bands import pieces_of_run, runs_of
from megatron_csbp.transformer.geometry.batches import Piece, make_tiles
from megatron_csbp.transformer.geometry.key_map import KeyMap
from megatron_csbp.transformer.geometry.needs import Interval, Lowering, Needs
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.scheme import CLEAN, CopyKind
from megatron_csbp.transformer.geometry.tiles import KeySource, Tile
from megatron_csbp.transformer.geometry.transfers import Transfer, clean_transfer, corrupted_transfer
from megatron_csbp.transformer.geometry.visibility import Mask


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """What one rank computes and exchanges in one attention layer.

    Attributes:
        rows: the rank's rows.
        mask: of the layer.
        clean_queries: whether clean rows attend; where nobody reads what they become, only their keys are needed.
        local_tiles: tiles that need no remote key: they run while the gather is on its way. First writers come first.
        gathered_tiles: tiles whose keys come from the buffer of gathered clean rows.
        clean: what is exchanged of the clean copy.
        corrupted: what the CP baseline exchanges of the corrupted copies.
        unwritten: rows that no tile writes first, as runs: they see nothing, or are merged into what is empty.
        unfinished: rows that no tile is known to write last, as runs.
    """

    rows: RankRows
    mask: Mask
    clean_queries: bool
    local_tiles: tuple[Tile, ...]
    gathered_tiles: tuple[Tile, ...]
    clean: Transfer
    corrupted: Transfer
    unwritten: tuple[Interval, ...]
    unfinished: tuple[Interval, ...]

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """All tiles in the order in which they run."""
        return self.local_tiles + self.gathered_tiles

    @property
    def exchanges(self) -> bool:
        """Whether ranks exchange keys."""
        return bool(self.clean)

    def transfer(self, copies: CopyKind) -> Transfer:
        """Return what is exchanged of one kind of copies."""
        return self.clean if copies is CopyKind.CLEAN else self.corrupted

    @property
    def transfers(self) -> tuple[tuple[CopyKind, Transfer], ...]:
        """What is exchanged at all, the clean copy first."""
        both = ((copies, self.transfer(copies)) for copies in CopyKind)
        return tuple((copies, transfer) for copies, transfer in both if transfer)

    @cached_property
    def backward_local_tiles(self) -> tuple[tuple[Tile, ...], tuple[Tile, ...]]:
        """The local tiles in two halves: beside the gather, and beside the reduce-scatter of the backward pass.

        Tiles with corrupted keys come before the reduce-scatter: the CP baseline sends their gradients there.
        """
        total, done = sum(tile.num_pairs for tile in self.local_tiles), 0
        beside_gather: list[Tile] = []
        beside_scatter: list[Tile] = []
        for tile in sorted(self.local_tiles, key=lambda tile: not tile.meets_corrupted_keys):
            early = tile.meets_corrupted_keys or 2 * done < total
            (beside_gather if early else beside_scatter).append(tile)
            done += tile.num_pairs
        return tuple(beside_gather), tuple(beside_scatter)

    @property
    def num_pairs(self) -> int:
        """Query-key pairs that this rank computes, for one head of one sequence."""
        return sum(tile.num_pairs for tile in self.tiles)


def plan_attention(rows: RankRows, mask: Mask, *, clean_queries: bool = True) -> AttentionPlan:
    """Return the plan of one rank.

    Args:
        rows: the rank's rows.
        mask: of the layer.
        clean_queries: whether clean rows attend.
    """
    if mask.window is not None and mask.window >= rows.sample.length:
        mask = replace(mask, window=None)
    needs = Needs(rows, mask, clean_queries)
    received: tuple[Interval, ...] = ()
    if needs.lowering in (Lowering.NEIGHBOUR, Lowering.RANGES):
        received = tuple(needs.by_rank[rows.rank])
    keys = KeyMap(rows, needs.lowering, received)
    pieces: list[Piece] = []
    covered: list[Interval] = []
    for span in rows.spans:
        if span.copy == CLEAN and not clean_queries:
            continue
        for run in runs_of(rows, span):
            found = list(pieces_of_run(run, rows.sample.block_size, mask, keys))
            pieces += found
            if any(piece.writes_first for piece in found):
                covered.append((run.row, run.row + run.stop - run.start))
    local = make_tiles(piece for piece in pieces if piece.source is KeySource.LOCAL)
    gathered = make_tiles(piece for piece in pieces if piece.source is KeySource.GATHERED)
    gathered, finished = _with_last_writers(gathered)
    return AttentionPlan(
        rows,
        mask,
        clean_queries,
        local,
        gathered,
        clean_transfer(needs),
        corrupted_transfer(needs),
        unwritten=_gaps(covered, rows.num_rows),
        unfinished=_gaps(finished, rows.num_rows),
    )


def _with_last_writers(tiles: tuple[Tile, ...]) -> tuple[tuple[Tile, ...], list[Interval]]:
    """Mark the tiles that are the last of their rows, and return them with those rows; only tiles of one run count."""
    marked: list[Tile] = []
    finished: list[Interval] = []
    for tile in reversed(tiles):
        pattern = tile.query
        start, stop = pattern.start, pattern.start + pattern.length
        if pattern.starts is not None or pattern.repeats or pattern.segments:
            return tiles, []  # rows here and there: not worth the search
        last = all(stop <= other_start or other_stop <= start for other_start, other_stop in finished)
        if last:
            finished.append((start, stop))
        elif not any(start >= other_start and stop <= other_stop for other_start, other_stop in finished):
            return tiles, []
        marked.append(replace(tile, writes_last=last))
    return tuple(reversed(marked)), finished


def _gaps(covered: list[Interval], num_rows: int) -> tuple[Interval, ...]:
    """Return the runs of rows between those that are covered."""
    gaps, row = [], 0
    for start, stop in [*sorted(covered), (num_rows, num_rows)]:
        if start > row:
            gaps.append((row, start))
        row = max(row, stop)
    return tuple(gaps)
