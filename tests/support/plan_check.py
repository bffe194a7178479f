# SPDX-License-Identifier: Apache-2.0
"""Plays a plan of a whole group on numbered rows: what is sent, what each tile reads, which pairs are computed.

Shapes: S local rows, R rows of the gather buffer, W whole rows (see `written_out_mask`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megatron_csbp.transformer.geometry.needs import Lowering
from megatron_csbp.transformer.geometry.plan import AttentionPlan, plan_attention
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.sample import IntArray, Sample
from megatron_csbp.transformer.geometry.scheme import CLEAN, Sharding
from megatron_csbp.transformer.geometry.tiles import KeySource, MaskKind, Tile
from megatron_csbp.transformer.geometry.transfers import Transfer
from megatron_csbp.transformer.geometry.visibility import Mask
from tests.support.written_out_mask import written_out


@dataclass(frozen=True)
class Group:
    """One sample and mask on a whole context group.

    Attributes:
        sample: blocks, documents, views.
        sharding: who owns which chunk.
        mask: of the layer.
        owners: rank of each active block, or None.
        clean_queries: whether clean rows attend.
    """

    sample: Sample
    sharding: Sharding
    mask: Mask
    owners: IntArray | None = None
    clean_queries: bool = True

    @cached_property
    def plans(self) -> list[AttentionPlan]:
        return [
            plan_attention(
                RankRows(self.sample, self.sharding, rank, self.owners), self.mask, clean_queries=self.clean_queries
            )
            for rank in range(self.sharding.group_size)
        ]

    def allowed(self, rank: int) -> npt.NDArray[np.bool_]:
        """Return what the rows of one rank see, bool [S, W]."""
        rows = self.plans[rank].rows
        allowed = written_out(
            self.sample, self.mask, zip(rows.copies.tolist(), rows.sample_positions.tolist(), strict=True)
        )
        if not self.clean_queries:
            allowed[rows.copies == CLEAN] = False
        return allowed


def whole_rows(rows: RankRows) -> IntArray:
    """Return the whole row that each local row is, int64 [S]."""
    view = np.where(rows.copies == CLEAN, rows.sample.num_views, rows.copies)
    return view * rows.sample.length + rows.sample_positions


def arrives(transfers: Mapping[int, Transfer], rows: Mapping[int, IntArray], rank: int) -> IntArray:
    """Return which whole row each row of a rank's gather buffer is after the collective, int64 [R]; -1 is padding.

    Args:
        transfers: of all ranks, by rank; of an exchange of ranges, the receiver's own and its senders' are enough.
        rows: whole rows of each of them.
        rank: the rank that receives.
    """
    mine = transfers[rank]
    if mine.lowering is Lowering.NOTHING:
        return np.zeros(0, dtype=np.int64)
    if mine.lowering is Lowering.ALL_GATHER:
        buffer = []
        for part in range(len(mine.parts)):
            for sender, transfer in sorted(transfers.items()):
                local = rows[sender]
                first, length = transfer.parts[part]
                buffer += [local[first : first + length], np.full(transfer.part_length - length, -1)]
        return np.concatenate(buffer)
    arrived = []
    assert {sender for sender, count in enumerate(mine.receive_counts) if count} <= transfers.keys()
    for sender, transfer in sorted(transfers.items()):
        local = rows[sender]
        assert transfer.send_rows is not None
        assert transfer.send_counts[rank] == mine.receive_counts[sender], "both ends count the same rows"
        first = sum(transfer.send_counts[:rank])
        arrived.append(local[transfer.send_rows[first : first + transfer.send_counts[rank]]])
    flat = np.concatenate(arrived)
    return flat if mine.arrival is None else flat[mine.arrival]


def pairs_of(tile: Tile) -> npt.NDArray[np.int64]:
    """Return which pairs of each problem of a tile are computed, int64 [T, U]."""
    pairs = np.ones((tile.query.num_rows, tile.key.num_rows), dtype=np.int64)
    if tile.mask is MaskKind.FULL:
        return pairs
    assert pairs.shape[0] == pairs.shape[1], "a triangle is square"
    return np.tril(pairs) if tile.mask is MaskKind.CAUSAL else np.triu(pairs)


def check_tiles(plan: AttentionPlan) -> None:
    """Within a tile no row and no key is there twice; and rows have one first writer at most, before all others."""
    written = np.zeros(plan.rows.num_rows, dtype=np.bool_)
    for start, stop in plan.unwritten:
        assert not written[start:stop].any(), "unwritten rows are told once"
        written[start:stop] = True
    unwritten = written.copy()
    for tile in plan.tiles:
        rows, keys = tile.query.rows(), tile.key.rows()
        assert len(rows) == len(keys) == tile.query.num_problems == tile.key.num_problems
        assert rows.shape[1] == tile.query.num_rows
        assert keys.shape[1] == tile.key.num_rows
        assert len(np.unique(rows)) == rows.size, "a row twice in a tile"
        assert len(np.unique(keys)) == keys.size, "a key twice in a tile"
        if tile.writes_first:
            assert not written[rows].any(), "two first writers, or one for a row that is told to have none"
            written[rows] = True
        else:
            assert written[rows].all(), "merged into what nobody has written"
    assert written.all(), "a row that nobody writes, and that is not told"
    later = np.zeros_like(written)
    finished = np.zeros_like(written)
    for tile in reversed(plan.tiles):
        rows = tile.query.rows()
        if tile.writes_last:
            assert not later[rows].any(), "a later tile writes these rows too"
            finished[rows] = True
        later[rows] = True
    unfinished = np.ones_like(written)
    for start, stop in plan.unfinished:
        unfinished[start:stop] = False
    assert (unfinished == finished).all(), "a row is finished by its last writer, or told"
    firsts = {int(row) for tile in plan.tiles if tile.writes_first for row in tile.query.rows().reshape(-1)}
    assert firsts.isdisjoint(np.flatnonzero(unwritten).tolist())


def computed_pairs(plan: AttentionPlan, gathered: IntArray) -> npt.NDArray[np.int64]:
    """Return how often each pair is computed, int64 [S, W]; every gathered row is read where ranges bring them.

    Args:
        plan: of the rank.
        gathered: whole row of each row of the gather buffer.
    """
    rows = plan.rows
    local = whole_rows(rows)
    pairs = np.zeros((rows.num_rows, (rows.sample.num_views + 1) * rows.sample.length), dtype=np.int64)
    read = np.zeros(len(gathered), dtype=np.bool_)
    for tile in plan.tiles:
        from_buffer = tile.key_source is KeySource.GATHERED
        keys = (gathered if from_buffer else local)[tile.key.rows()]
        if from_buffer:
            read[tile.key.rows()] = True
        assert (keys >= 0).all(), "padding is read"
        first_clean = rows.sample.num_views * rows.sample.length
        if not tile.meets_corrupted_keys:
            assert (keys >= first_clean).all(), "corrupted keys in a tile that is said to have none"
        of_tile = np.broadcast_to(pairs_of(tile), (len(keys), tile.query.num_rows, tile.key.num_rows))
        np.add.at(pairs, (tile.query.rows()[:, :, None], keys[:, None, :]), of_tile)
        assert tile.num_pairs == of_tile.sum()
    if plan.clean.lowering in (Lowering.RANGES, Lowering.NEIGHBOUR):
        assert read.all(), "a row was sent and not read"
    return pairs


def check_group(group: Group) -> None:
    """Every allowed pair is computed exactly once, by each rank that holds the row, and no other."""
    transfers = {rank: plan.clean for rank, plan in enumerate(group.plans)}
    rows = {rank: whole_rows(plan.rows) for rank, plan in enumerate(group.plans)}
    assert len({transfer.lowering for transfer in transfers.values()}) == 1, "all ranks start the same collective"
    counted = np.zeros((group.sample.num_views + 1) * group.sample.length, dtype=np.int64)
    for rank, plan in enumerate(group.plans):
        check_tiles(plan)
        gathered = arrives(transfers, rows, rank)
        assert len(gathered) == plan.clean.num_rows
        allowed = group.allowed(rank)
        computed = computed_pairs(plan, gathered)
        wrong = np.argwhere(computed != allowed)
        assert not len(wrong), f"rank {rank}: row, whole key {wrong[:5].tolist()}"
        assert plan.num_pairs == allowed.sum()
        np.add.at(counted, rows[rank][plan.rows.is_counted], 1)
    existing = np.ones_like(counted, dtype=np.bool_)
    active = np.repeat(group.sample.active_blocks, group.sample.block_size, axis=1)
    existing[: active.size] = active.reshape(-1)
    for view in group.sample.views:
        for start in range(0, group.sample.length, group.sample.block_size):
            inside = any(first <= start < stop for first, stop in group.sample.documents.tolist())
            assert inside or not active[view, start], "a corrupted row of padding"
    assert (counted == existing).all(), "every row counts on exactly one rank"
