# SPDX-License-Identifier: Apache-2.0
"""Which clean positions each rank needs from which other, and the cheapest collective that brings them. Pure.

A transfer lowers to

    all-gather   every rank gets every chunk (dense need: full attention)
    neighbour    ranges from at most two other ranks (a window's halo: the w-1 positions before each chunk)
    ranges       an all-to-all of ranges (documents, blocks that are computed away from their chunk)
    nothing      pure BP, one rank, documents that end inside their chunk

whichever brings the busiest rank fewest rows; all ranks choose alike, since each looks at all. The way back of the
gradients is the transpose. The CP baseline also sends the corrupted rows at the same positions, which nobody reads.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_csbp.transformer.geometry.needs import Interval, Lowering, Needs
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.sample import IntArray
from megatron_csbp.transformer.geometry.scheme import CLEAN, Scheme


@dataclass(frozen=True, eq=False)
class Transfer:
    """What one rank sends and receives in one layer's gather; backwards, what it gets and gives.

    All-gather: each rank gives one part a chunk, the late chunk's first; part i of all ranks, in rank order, is
    section i of the buffer. Neighbour and ranges: rows for rank 0, rank 1, ... are `send_rows`; the buffer holds what
    arrives, in the order of positions.

    Attributes:
        lowering: the collective.
        group_size: P.
        num_rows: R, rows of the buffer of gathered keys.
        remote_rows: rows that other ranks send to this one.
        parts: all-gather: first local row and number of rows of each part.
        part_length: all-gather: rows of every part on the wire; a shorter one is padded.
        send_counts: ranges: rows for each rank.
        receive_counts: ranges: rows from each rank.
        send_rows: ranges: local rows in the order in which they are sent, int64.
        arrival: ranges: for each row of the buffer, which arrival it is, int64; None if in the order of arrival.
    """

    lowering: Lowering
    group_size: int
    num_rows: int = 0
    remote_rows: int = 0
    parts: tuple[Interval, ...] = ()
    part_length: int = 0
    send_counts: tuple[int, ...] = ()
    receive_counts: tuple[int, ...] = ()
    send_rows: IntArray | None = None
    arrival: IntArray | None = None

    def __bool__(self) -> bool:
        """Whether anything is exchanged, on any rank."""
        return self.lowering is not Lowering.NOTHING

    @property
    def sent_rows(self) -> int:
        """Rows that this rank sends to others: what its gradients bring back."""
        return self.remote_rows if self.lowering is Lowering.ALL_GATHER else sum(self.send_counts)

    def buffer_bytes(self, row_bytes: int) -> int:
        """Return the bytes of the gathered keys and values, given the bytes of one row's."""
        return self.num_rows * row_bytes

    def gather_bytes(self, row_bytes: int) -> int:
        """Return the bytes that other ranks send to this one, given the bytes of one row's keys and values."""
        return self.remote_rows * row_bytes

    def reduce_bytes(self, row_bytes: int) -> int:
        """Return the bytes of gradients that other ranks send to this one."""
        return self.sent_rows * row_bytes


def row_bytes(num_key_value_heads: int, head_dim: int, itemsize: int, micro_batch_size: int = 1) -> int:
    """Return the bytes of the keys and values of one row: 2 x K x D x itemsize x micro-batch."""
    return 2 * num_key_value_heads * head_dim * itemsize * micro_batch_size


def clean_transfer(needs: Needs) -> Transfer:
    """Return what the clean keys and values of one layer need."""
    rows = needs.rows
    size, length = rows.sharding.group_size, rows.chunk_length
    if needs.lowering is Lowering.NOTHING:
        return Transfer(Lowering.NOTHING, size)
    if needs.lowering is Lowering.ALL_GATHER:
        parts = tuple((rows.row_of(CLEAN, chunk * length), length) for chunk in reversed(rows.chunks))
        return _all_gather(size, parts, length)
    pieces = [_held_by(rows, needs.by_rank[rows.rank], source) for source in range(size)]
    sent = [_held_by(rows, intervals, rows.rank) for intervals in needs.by_rank]
    arrivals = np.concatenate([np.arange(start, stop) for part in pieces for start, stop in part] or [_NONE])
    in_order = bool((np.diff(arrivals) > 0).all())
    send_rows = [np.arange(stop - start) + rows.row_of(CLEAN, start) for part in sent for start, stop in part]
    return _ranges(
        needs.lowering,
        send_rows=np.concatenate(send_rows or [_NONE]),
        send_counts=tuple(_total(part) for part in sent),
        receive_counts=tuple(_total(part) for part in pieces),
        arrival=None if in_order else np.argsort(arrivals),
    )


def corrupted_transfer(needs: Needs) -> Transfer:
    """Return what the CP baseline sends besides: the corrupted rows where the clean ones are sent; else nothing."""
    rows = needs.rows
    size = rows.sharding.group_size
    if rows.sharding.scheme is not Scheme.CONTEXT_PARALLEL or needs.lowering is Lowering.NOTHING:
        return Transfer(Lowering.NOTHING, size)
    if needs.lowering is Lowering.ALL_GATHER:
        per_chunk = rows.sample.active_blocks.reshape(rows.sample.num_views, rows.sharding.num_chunks, -1)
        longest = int(per_chunk.sum(axis=(0, 2)).max()) * rows.sample.block_size
        parts = tuple(_corrupted_part(rows, chunk) for chunk in reversed(rows.chunks))
        return _all_gather(size, parts, longest) if longest else Transfer(Lowering.NOTHING, size)
    received = [_total(_corrupted_rows(rows, needs.by_rank[rows.rank], source)) for source in range(size)]
    sent = [_corrupted_rows(rows, intervals, rows.rank) for intervals in needs.by_rank]
    held = [np.arange(stop - start) + rows.row_of(view, start) for per_rank in sent for view, start, stop in per_rank]
    return _ranges(
        needs.lowering,
        send_rows=np.concatenate(held or [_NONE]),
        send_counts=tuple(map(_total, sent)),
        receive_counts=tuple(received),
        arrival=None,
    )


_NONE = np.zeros(0, dtype=np.int64)


def _all_gather(size: int, parts: tuple[Interval, ...], part_length: int) -> Transfer:
    rows = len(parts) * part_length
    return Transfer(Lowering.ALL_GATHER, size, size * rows, (size - 1) * rows, parts, part_length)


def _ranges(
    lowering: Lowering,
    *,
    send_rows: IntArray,
    send_counts: tuple[int, ...],
    receive_counts: tuple[int, ...],
    arrival: IntArray | None,
) -> Transfer:
    received = sum(receive_counts)
    return Transfer(
        lowering,
        len(send_counts),
        received,
        received,
        send_counts=send_counts,
        receive_counts=receive_counts,
        send_rows=send_rows,
        arrival=arrival,
    )


def _total(pieces: Iterable[tuple[int, ...]]) -> int:
    return sum(piece[-1] - piece[-2] for piece in pieces)


def _held_by(rows: RankRows, intervals: Sequence[Interval], owner: int) -> list[Interval]:
    """Return the parts of intervals in an owner's chunks, in the order of positions."""
    length = rows.chunk_length
    found = [
        (max(start, chunk * length), min(stop, (chunk + 1) * length))
        for chunk in rows.sharding.chunks_of(owner)
        for start, stop in intervals
    ]
    return sorted((start, stop) for start, stop in found if start < stop)


def _corrupted_rows(rows: RankRows, intervals: Sequence[Interval], owner: int) -> list[tuple[int, int, int]]:
    """Return (view, start, stop) of the active blocks' positions that an owner has in these intervals."""
    block = rows.sample.block_size
    found: list[tuple[int, int, int]] = []
    for start, stop in _held_by(rows, intervals, owner):
        for view in rows.sample.views:
            found += [
                (view, max(start, number * block), min(stop, (number + 1) * block))
                for number in range(start // block, -(-stop // block))
                if rows.sample.active_blocks[view, number]
            ]
    return found


def _corrupted_part(rows: RankRows, chunk: int) -> Interval:
    """Return first row and number of rows of the corrupted rows of an owned chunk: they are consecutive."""
    spans = [span for span in rows.spans if span.copy != CLEAN and span.chunk == chunk]
    return (spans[0].first_row, sum(span.length for span in spans)) if spans else (0, 0)
