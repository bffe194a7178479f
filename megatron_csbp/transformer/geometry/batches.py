# SPDX-License-Identifier: Apache-2.0
"""Collects rectangles and triangles of a mask and makes tiles of them: batches of equal problems. Pure."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megatron_csbp.transformer.geometry.sample import IntArray
from megatron_csbp.transformer.geometry.tiles import KeySource, MaskKind, Repeats, RowPattern, Tile

type Series = tuple[tuple[int, int, int], ...]
"""(count, row stride, key stride) of nested repetitions, outermost first."""


class Piece(NamedTuple):
    """A rectangle or triangle, rows [row, row + num_rows) x keys [key, key + num_keys), and its repetitions."""

    source: KeySource
    mask: MaskKind
    row: int
    num_rows: int
    key: int
    num_keys: int
    series: Series = ()
    writes_first: bool = False
    corrupted_keys: bool = False

    def repeated(self, count: int, row_stride: int, key_stride: int) -> "list[Piece]":
        """Return the piece `count` times: one series, or several where the keys of one would overlap."""
        if count == 1:
            return [self]
        extent = self.num_keys + sum((times - 1) * stride for times, _, stride in self.series)
        ways = min(count, -(-extent // key_stride))
        return [
            self._replace(
                row=self.row + way * row_stride,
                key=self.key + way * key_stride,
                series=_longer((count - way - 1) // ways + 1, ways * row_stride, ways * key_stride, self.series),
            )
            for way in range(ways)
        ]


def _longer(count: int, row_stride: int, key_stride: int, series: Series) -> Series:
    return ((count, row_stride, key_stride), *series) if count > 1 else series


class _Problem(NamedTuple):
    """Pieces that became one: the rows of a problem are `segments` runs of equal length, `spacing` apart."""

    piece: Piece
    segments: int = 1
    spacing: int = 0


def make_tiles(pieces: Iterable[Piece]) -> tuple[Tile, ...]:
    """Return tiles that cover just these pieces, in the order of each shape's first piece, first writers first.

    Unmasked pieces with the same keys become problems with more rows: corrupted rows of all views and clean rows see
    the same clean prefix. Equal shapes then become one batch, as far as its problems share no row and no key.
    """
    shapes: dict[tuple[object, ...], list[_Problem]] = {}
    for problem in _with_joint_rows(pieces):
        piece, segments, spacing = problem
        shape = (piece.mask, piece.num_rows, piece.num_keys, piece.writes_first, segments, spacing)
        found = shapes.get(shape)
        if found is None:
            shapes[shape] = [problem]
        else:
            found.append(problem)
    tiles = [tile for problems in shapes.values() for tile in _batches(problems)]
    tiles.sort(key=lambda tile: not tile.writes_first)
    return tuple(tiles)


def _with_joint_rows(pieces: Iterable[Piece]) -> list[_Problem]:
    """Join unmasked pieces that meet the same keys."""
    same_keys: dict[tuple[object, ...], list[Piece]] = {}
    problems: list[_Problem] = []
    for piece in pieces:
        if piece.writes_first or piece.mask is not MaskKind.FULL:
            problems.append(_Problem(piece))
            continue
        # Single pieces may have any number of rows; in a series the rows of each must be equally many.
        keys = (piece.key, piece.num_keys, piece.series, piece.num_rows if piece.series else 0)
        found = same_keys.get(keys)
        if found is None:
            same_keys[keys] = [piece]
        else:
            found.append(piece)
    for group in same_keys.values():
        if len(group) == 1:
            problems.append(_Problem(group[0]))
        else:
            problems.extend(_joined(group))
    return problems


def _joined(group: list[Piece]) -> list[_Problem]:
    """Return problems for pieces with the same keys: neighbouring rows as one run, equally spaced runs as segments."""
    if not group[0].series:
        runs: list[Piece] = []
        for piece in sorted(group, key=lambda piece: piece.row):
            if runs and runs[-1].row + runs[-1].num_rows == piece.row:
                runs[-1] = runs[-1]._replace(num_rows=runs[-1].num_rows + piece.num_rows)
            else:
                runs.append(piece)
        group = runs
    spacings = {after.row - before.row for before, after in pairwise(group)}
    lengths = {piece.num_rows for piece in group}
    if len(group) > 1 and len(spacings) == len(lengths) == 1 and min(spacings) > 0:
        return [_Problem(group[0], len(group), spacings.pop())]
    return [_Problem(piece) for piece in group]


def _batches(problems: list[_Problem]) -> list[Tile]:
    """Return one tile for problems of one shape, or several where they share rows or keys."""
    first = problems[0]
    if len(problems) == 1:
        return [_tile(problems, first.piece.series)]
    outer = _regular(problems)
    if outer is not None:
        return [_tile(problems, (outer, *first.piece.series))]
    rows, keys = _all_starts(problems)
    return [_listed(problems, rows[chosen], keys[chosen]) for chosen in _disjoint(rows, keys, first)]


def _regular(problems: Sequence[_Problem]) -> tuple[int, int, int] | None:
    """Return the outer strides of problems that are equal series at equal distances, and surely apart; else None."""
    piece, segments, spacing = problems[0]
    row_step, key_step = problems[1].piece.row - piece.row, problems[1].piece.key - piece.key
    before = piece
    for after, _, _ in problems[1:]:
        if after.row - before.row != row_step or after.key - before.key != key_step or after.series != piece.series:
            return None
        before = after
    rows = piece.num_rows + (segments - 1) * spacing + sum((count - 1) * row for count, row, _ in piece.series)
    keys = piece.num_keys + sum((count - 1) * key for count, _, key in piece.series)
    return (len(problems), row_step, key_step) if row_step >= rows and key_step >= keys else None


def _all_starts(problems: Iterable[_Problem]) -> tuple[IntArray, IntArray]:
    """Return the first row and the first key of every repetition of some problems."""
    rows: list[int] = []
    keys: list[int] = []
    for piece, _, _ in problems:
        starts = [(piece.row, piece.key)]
        for count, row_stride, key_stride in piece.series:
            starts = [(row + i * row_stride, key + i * key_stride) for row, key in starts for i in range(count)]
        for row, key in starts:
            rows.append(row)
            keys.append(key)
    return np.array(rows, dtype=np.int64), np.array(keys, dtype=np.int64)


def _disjoint(rows: IntArray, keys: IntArray, shape: _Problem) -> list[IntArray]:
    """Deal problems into as few batches as come easily, so that within a batch none share a row or a key."""
    spread = (shape.segments - 1) * shape.spacing + shape.piece.num_rows
    num_keys = shape.piece.num_keys
    runs = np.sort((rows[:, None] + shape.spacing * np.arange(shape.segments)).reshape(-1))
    if (np.diff(runs) >= shape.piece.num_rows).all() and (np.diff(np.sort(keys)) >= num_keys).all():
        return [np.arange(len(rows))]
    left = np.argsort(rows, kind="stable").tolist()
    first_rows, first_keys = rows.tolist(), keys.tolist()
    batches: list[IntArray] = []
    while left:
        chosen: list[int] = []
        refused: list[int] = []
        row_stop, taken = -1, _Taken()
        for index in left:
            row, key = first_rows[index], first_keys[index]
            if row >= row_stop and taken.add(key, key + num_keys):
                chosen.append(index)
                row_stop = row + spread
            else:
                refused.append(index)
        batches.append(np.array(chosen))
        left = refused
    return batches


class _Taken:
    """A set of disjoint intervals."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, start: int, stop: int) -> bool:
        """Add an interval unless it meets one that is there; return whether it was added."""
        place = bisect_left(self._starts, start)
        if place < len(self._starts) and self._starts[place] < stop:
            return False
        if place and self._stops[place - 1] > start:
            return False
        self._starts.insert(place, start)
        self._stops.insert(place, stop)
        return True


def _tile(problems: Sequence[_Problem], series: Series) -> Tile:
    """Return a batch of problems at regular strides."""
    piece = problems[0].piece
    query = RowPattern(piece.num_rows, piece.row, tuple((n, row) for n, row, _ in series), _segments(problems[0]))
    return _of(problems, query, RowPattern(piece.num_keys, piece.key, tuple((n, key) for n, _, key in series)))


def _listed(problems: Sequence[_Problem], rows: IntArray, keys: IntArray) -> Tile:
    """Return a batch of problems at listed starts."""
    piece, segments = problems[0].piece, _segments(problems[0])
    if len(rows) == 1:
        query = RowPattern(piece.num_rows, int(rows[0]), segments=segments)
        return _of(problems, query, RowPattern(piece.num_keys, int(keys[0])))
    query = RowPattern(piece.num_rows, segments=segments, starts=rows)
    return _of(problems, query, RowPattern(piece.num_keys, starts=keys))


def _segments(problem: _Problem) -> Repeats:
    return ((problem.segments, problem.spacing),) if problem.segments > 1 else ()


def _of(problems: Sequence[_Problem], query: RowPattern, key: RowPattern) -> Tile:
    piece = problems[0].piece
    corrupted = any(problem.piece.corrupted_keys for problem in problems)
    return Tile(query, key, piece.source, piece.mask, piece.writes_first, corrupted)
