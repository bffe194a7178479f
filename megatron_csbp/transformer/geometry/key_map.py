# SPDX-License-Identifier: Apache-2.0
"""Where clean keys lie on a rank: among its own rows, or in the buffer of gathered ones. Pure.

In an all-gather every rank's late chunk lies in the first half of the buffer, in rank order, and every early chunk in
the second. With the dual-end assignment the positions before a chunk are then at most two runs of rows, and one if
they begin at 0, although not a row was moved after it arrived. An unmasked tile does not care about the order of keys.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_csbp.transformer.geometry.needs import Interval, Lowering
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.scheme import CLEAN
from megatron_csbp.transformer.geometry.tiles import KeySource


class KeyRun(NamedTuple):
    """Positions [start, stop) in consecutive rows of one source, from `row` on."""

    source: KeySource
    row: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Rows."""
        return self.stop - self.start


@dataclass(frozen=True)
class KeyMap:
    """Finds clean keys by position.

    Attributes:
        rows: this rank's rows.
        lowering: how keys of other ranks come.
        received: neighbour and ranges: the positions that come, in order.
    """

    rows: RankRows
    lowering: Lowering
    received: tuple[Interval, ...] = ()
    _local_rows: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for span in self.rows.spans:
            if span.copy == CLEAN:
                self._local_rows[span.chunk] = span.first_row

    def holds(self, position: int) -> bool:
        """Return whether this rank holds the clean rows of a position's chunk."""
        return self.rows.holds_clean(position // self.rows.chunk_length)

    def local(self, position: int) -> int:
        """Return the local row of a clean position that this rank holds."""
        if self.rows.sharding.clean_is_replicated:
            return self._local_rows[0] + position
        chunk, offset = divmod(position, self.rows.chunk_length)
        return self._local_rows[chunk] + offset

    def home(self, position: int) -> KeyRun:
        """Return where a position's key lies, for rows of its own chunk: locally if this rank holds that chunk."""
        if self.holds(position):
            return KeyRun(KeySource.LOCAL, self.local(position), position, position + 1)
        return KeyRun(KeySource.GATHERED, self._gathered(position), position, position + 1)

    def in_order(self, start: int, stop: int, base: int) -> list[KeyRun]:
        """Return the positions [start, stop) as runs in which rows follow positions.

        Args:
            start: first position.
            stop: first position behind.
            base: positions from here on are those of the rows' own chunk and document.
        """
        runs: list[KeyRun] = []
        for begin, end, own in ((start, min(stop, base), False), (max(start, base), stop, True)):
            if begin < end:
                runs.extend(self._runs(begin, end, own))
        return runs

    def anywhere(self, start: int, stop: int) -> list[KeyRun]:
        """Return the positions [start, stop) before a chunk as few runs, in which rows may not follow positions."""
        merged: list[KeyRun] = []
        for run in sorted(self.in_order(start, stop, stop), key=lambda run: (run.source, run.row)):
            before = merged[-1] if merged else None
            if before is not None and (before.source, before.row + before.length) == (run.source, run.row):
                merged[-1] = before._replace(stop=before.stop + run.length)  # its length is all that counts
            else:
                merged.append(run)
        return merged

    def _runs(self, start: int, stop: int, own: bool) -> list[KeyRun]:
        """Return runs of positions that are in the rows' own chunk, or before it."""
        if self.rows.sharding.clean_is_replicated or self.rows.sharding.group_size == 1:
            return [KeyRun(KeySource.LOCAL, self.local(start), start, stop)]
        length = self.rows.chunk_length
        runs: list[KeyRun] = []
        while start < stop:
            chunk = start // length
            end = min(stop, (chunk + 1) * length)
            # A whole gathered copy holds this rank's other chunk too, in line with its neighbours.
            if self.rows.holds_clean(chunk) and (own or self.lowering is not Lowering.ALL_GATHER):
                run = KeyRun(KeySource.LOCAL, self.local(start), start, end)
            else:
                run = KeyRun(KeySource.GATHERED, self._gathered(start), start, end)
            before = runs[-1] if runs else None
            if before is not None and (before.source, before.row + before.length) == (run.source, run.row):
                runs[-1] = before._replace(stop=end)
            else:
                runs.append(run)
            start = end
        return runs

    def _gathered(self, position: int) -> int:
        """Return a position's row in the buffer."""
        if self.lowering is Lowering.ALL_GATHER:
            chunk, offset = divmod(position, self.rows.chunk_length)
            return gather_slot(self.rows, chunk) * self.rows.chunk_length + offset
        row = 0
        for start, stop in self.received:
            if start <= position < stop:
                return row + position - start
            row += stop - start
        raise AssertionError(f"position {position} is not among those that are received")


def gather_slot(rows: RankRows, chunk: int) -> int:
    """Return the slot of a clean chunk in the buffer of 2P chunks of an all-gather."""
    rank = rows.sharding.owner_of(chunk)
    _, late = rows.sharding.chunks_of(rank)
    return rank if chunk == late else rows.sharding.group_size + rank
