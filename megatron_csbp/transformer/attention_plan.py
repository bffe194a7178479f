# SPDX-License-Identifier: Apache-2.0
"""Which query rows of a rank meet which keys, as a few dense or causal tiles. Pure: no torch.distributed, no Megatron.

The block-diffusion mask allows: corrupted -> corrupted in the same block, both directions; corrupted -> clean in
strictly earlier blocks; clean -> clean token-causal or block-causal; clean -> corrupted never. A plan covers every
allowed pair exactly once:

1. prefix: a chunk's query rows x all clean keys before the chunk. Unmasked, and the only tiles that need remote keys.
2. clean diagonal: a chunk's clean rows x its own clean keys, causal or block by block.
3. corrupted diagonal: each corrupted block x itself, all blocks in one batch.
4. staircase: rows of a chunk x strictly earlier blocks of the same chunk. At level w the blocks pair up in runs of w:
   the odd run of each pair meets the whole even run. The runs of one level form one batch; log2 levels, no mask, no
   wasted pair.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np

from megatron_csbp.transformer.layout import Scheme, SequenceLayout, Stream
from megatron_csbp.transformer.tile import KeySource, MaskKind, Repeats, RowPattern, Tile, TileKind


class CleanAttention(StrEnum):
    """What a clean row sees of the clean copy: earlier tokens, or its own block and earlier blocks."""

    TOKEN_CAUSAL = "token-causal"
    BLOCK_CAUSAL = "block-causal"


@dataclass(frozen=True)
class AttentionPlan:
    """What one rank computes and exchanges in one attention layer.

    Attributes:
        layout: the rank's rows.
        clean_attention: mask of the clean copy.
        clean_queries: whether clean rows attend; where nobody reads what they become, only their keys are needed.
    """

    layout: SequenceLayout
    clean_attention: CleanAttention
    clean_queries: bool = True

    @cached_property
    def local_tiles(self) -> tuple[Tile, ...]:
        """Tiles that need no remote key: they run while the gather is on its way."""
        prefixes = _local_prefix_tiles(self.layout) if self.layout.clean_is_replicated else ()
        if not self.clean_queries:
            return (_corrupted_diagonal_tile(self.layout), *_corrupted_staircase(self.layout), *prefixes)
        return (
            _corrupted_diagonal_tile(self.layout),
            _clean_diagonal_tile(self.layout, self.clean_attention),
            *_corrupted_staircase(self.layout),
            *_clean_staircase(self.layout, self.clean_attention),
            *prefixes,
        )

    @cached_property
    def gathered_tiles(self) -> tuple[Tile, ...]:
        """Tiles whose keys come from the buffer of gathered clean chunks."""
        return _gathered_prefix_tiles(self.layout, self.clean_queries) if self.exchanged_streams else ()

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """All tiles in the order in which they run."""
        return self.local_tiles + self.gathered_tiles

    @cached_property
    def backward_local_tiles(self) -> tuple[tuple[Tile, ...], tuple[Tile, ...]]:
        """The local tiles in two halves: beside the gather, and beside the reduce-scatter of the backward pass.

        The corrupted diagonal comes before the reduce-scatter, since the CP baseline sends its key gradients there.
        """
        total, done = sum(tile.num_pairs for tile in self.local_tiles), 0
        beside_gather: list[Tile] = []
        beside_scatter: list[Tile] = []
        for tile in sorted(self.local_tiles, key=lambda tile: tile.kind is not TileKind.CORRUPTED_DIAGONAL):
            early = tile.kind is TileKind.CORRUPTED_DIAGONAL or 2 * done < total
            (beside_gather if early else beside_scatter).append(tile)
            done += tile.num_pairs
        return tuple(beside_gather), tuple(beside_scatter)

    @property
    def exchanged_streams(self) -> tuple[Stream, ...]:
        """Copies whose keys and values are exchanged: clean for CSBP, both for the CP baseline, none otherwise."""
        if self.layout.scheme is Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL:
            return (Stream.CLEAN,)
        return (Stream.CLEAN, Stream.CORRUPTED) if self.layout.scheme is Scheme.CONTEXT_PARALLEL else ()

    @property
    def num_pairs(self) -> int:
        """Query-key pairs that this rank computes, for one head of one sequence."""
        return sum(tile.num_pairs for tile in self.tiles)

    def gathered_bytes(
        self, stream: Stream, num_key_value_heads: int, head_dim: int, itemsize: int, micro_batch_size: int = 1
    ) -> int:
        """Return the bytes of one copy's gathered keys and values, this rank's own among them; see `remote_bytes`."""
        if stream not in self.exchanged_streams:
            return 0
        rows = self.layout.num_chunks * self.layout.chunk_length
        return rows * 2 * num_key_value_heads * head_dim * itemsize * micro_batch_size

    def remote_bytes(
        self, stream: Stream, num_key_value_heads: int, head_dim: int, itemsize: int, micro_batch_size: int = 1
    ) -> int:
        """Return the bytes that one gather (or reduce-scatter) of one copy's keys and values brings from other ranks.

        This is the closed form u(rows) = (P-1)/P x rows x 2 x K x D x itemsize of one rank and layer, with `rows` = L.

        Args:
            stream: the copy that is exchanged.
            num_key_value_heads: K, key/value heads on this rank.
            head_dim: D.
            itemsize: bytes of one element.
            micro_batch_size: B.
        """
        gathered = self.gathered_bytes(stream, num_key_value_heads, head_dim, itemsize, micro_batch_size)
        return gathered // self.layout.group_size * (self.layout.group_size - 1)


def allowed_pairs(sequence_length: int, block_size: int, clean_attention: CleanAttention) -> int:
    """Return the number of query-key pairs that the whole mask allows, for one head of one sequence.

    Token-causal: LM + (L^2 - LM)/2 + L(L+1)/2. Block-causal: L^2 + LM.
    """
    length, block = sequence_length, block_size
    if clean_attention is CleanAttention.BLOCK_CAUSAL:
        return length * length + length * block
    return length * block + (length * length - length * block) // 2 + length * (length + 1) // 2


def gather_slot(layout: SequenceLayout, chunk: int) -> int:
    """Return the slot of a clean chunk in the gather buffer of 2P chunks.

    Every rank's late chunk lies in the first half, in rank order, and every early chunk in the second half. With the
    dual-end assignment each prefix is then one contiguous slice, although no row was moved: an unmasked tile does not
    care about key order.
    """
    rank = layout.owner_of(chunk)
    _, late = layout.chunks_of(rank)
    return rank if chunk == late else layout.group_size + rank


def _chunk_pattern(layout: SequenceLayout, stream: Stream, offset: int, length: int, repeats: Repeats) -> RowPattern:
    """Return the same runs inside each owned chunk of one copy; `offset` is counted from the chunk's start."""
    first = [layout.first_row(stream, chunk) for chunk in layout.chunks]
    chunk_repeat = ((2, first[1] - first[0]),) if len(first) == 2 else ()
    return RowPattern(first[0] + offset, length, chunk_repeat + repeats)


def _clean_pattern(layout: SequenceLayout, offset: int, length: int, repeats: Repeats) -> RowPattern:
    """Return runs of clean rows: inside each owned chunk, or once over the whole copy where it is replicated."""
    if layout.clean_is_replicated:
        return RowPattern(layout.first_row(Stream.CLEAN, 0) + offset, length, repeats)
    return _chunk_pattern(layout, Stream.CLEAN, offset, length, repeats)


def _corrupted_diagonal_tile(layout: SequenceLayout) -> Tile:
    """Each corrupted block x itself."""
    blocks = ((layout.blocks_per_chunk, layout.block_size),)
    rows = _chunk_pattern(layout, Stream.CORRUPTED, 0, layout.block_size, blocks)
    return Tile(TileKind.CORRUPTED_DIAGONAL, rows, rows)


def _clean_diagonal_tile(layout: SequenceLayout, clean_attention: CleanAttention) -> Tile:
    """The clean rows x their own chunk (the whole copy where it is replicated), causal or block by block."""
    replicated = layout.clean_is_replicated
    if clean_attention is CleanAttention.TOKEN_CAUSAL:
        rows = _clean_pattern(layout, 0, layout.sequence_length if replicated else layout.chunk_length, ())
        return Tile(TileKind.CLEAN_DIAGONAL, rows, rows, mask=MaskKind.CAUSAL)
    num_blocks = layout.num_blocks if replicated else layout.blocks_per_chunk
    rows = _clean_pattern(layout, 0, layout.block_size, ((num_blocks, layout.block_size),))
    return Tile(TileKind.CLEAN_DIAGONAL, rows, rows)


def _corrupted_staircase(layout: SequenceLayout) -> Iterator[Tile]:
    """Corrupted rows of a chunk x strictly earlier clean blocks of the chunk."""
    for query_rows, key_rows, repeats in _staircase_runs(layout.blocks_per_chunk, layout.block_size):
        yield Tile(
            TileKind.STAIRCASE,
            _chunk_pattern(layout, Stream.CORRUPTED, query_rows.start, len(query_rows), repeats),
            _chunk_pattern(layout, Stream.CLEAN, key_rows.start, len(key_rows), repeats),
        )


def _clean_staircase(layout: SequenceLayout, clean_attention: CleanAttention) -> Iterator[Tile]:
    """Clean rows x strictly earlier blocks of their chunk (or whole copy), if block-causal."""
    if clean_attention is CleanAttention.TOKEN_CAUSAL:
        return
    num_blocks = layout.num_blocks if layout.clean_is_replicated else layout.blocks_per_chunk
    for query_rows, key_rows, repeats in _staircase_runs(num_blocks, layout.block_size):
        query, key = (_clean_pattern(layout, rows.start, len(rows), repeats) for rows in (query_rows, key_rows))
        yield Tile(TileKind.STAIRCASE, query, key)


def _staircase_runs(num_blocks: int, block_size: int) -> list[tuple[range, range, Repeats]]:
    """Cut the strictly lower block triangle into batches of rectangles: (query rows, key rows, repeats).

    Block i meets block j < i at the level of the highest bit in which i and j differ, so any number of blocks is
    covered once. A level's last odd run may be cut short by the end of the chunk: it is a rectangle of its own.
    """
    runs: list[tuple[range, range, Repeats]] = []
    width = 1
    while width < num_blocks:
        whole, rest = divmod(num_blocks, 2 * width)
        step = width * block_size
        if whole:
            runs.append((range(step, 2 * step), range(step), ((whole, 2 * step),)))
        if rest > width:
            start = 2 * whole * step
            runs.append((range(start + step, num_blocks * block_size), range(start, start + step), ()))
        width *= 2
    return runs


def _local_prefix_tiles(layout: SequenceLayout) -> tuple[Tile, ...]:
    """Corrupted rows of each owned chunk x the clean keys before it, all local (pure BP)."""
    first, chunk_length = layout.first_row(Stream.CLEAN, 0), layout.chunk_length
    return tuple(
        Tile(
            TileKind.PREFIX,
            RowPattern(layout.first_row(Stream.CORRUPTED, chunk), chunk_length),
            RowPattern(first, chunk * chunk_length),
        )
        for chunk in layout.chunks
        if chunk > 0
    )


def _gathered_prefix_tiles(layout: SequenceLayout, clean_queries: bool) -> tuple[Tile, ...]:
    """All rows of each owned chunk x the gathered clean keys before it: one tile for each contiguous run of slots."""
    tiles = []
    for chunk in layout.chunks:
        # A chunk's clean rows come right after its corrupted ones.
        rows = (2 if clean_queries else 1) * layout.chunk_length
        query = RowPattern(layout.first_row(Stream.CORRUPTED, chunk), rows)
        slots = np.sort([gather_slot(layout, earlier) for earlier in range(chunk)])
        for run in np.split(slots, np.flatnonzero(np.diff(slots) > 1) + 1):
            if run.size:
                key = RowPattern(int(run[0]) * layout.chunk_length, run.size * layout.chunk_length)
                tiles.append(Tile(TileKind.PREFIX, query, key, KeySource.GATHERED))
    return tuple(tiles)
