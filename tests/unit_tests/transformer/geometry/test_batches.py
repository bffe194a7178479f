# SPDX-License-Identifier: Apache-2.0
"""Batches of equal problems: what is joined, what is kept apart, and in which order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_csbp.transformer.geometry.batches import Piece, make_tiles
from megatron_csbp.transformer.geometry.tiles import KeySource, MaskKind

FULL, CAUSAL = MaskKind.FULL, MaskKind.CAUSAL


def piece(row: int, num_rows: int, key: int, num_keys: int, mask: MaskKind = FULL, **more: object) -> Piece:
    return Piece(KeySource.LOCAL, mask, row, num_rows, key, num_keys)._replace(**more)  # type: ignore[arg-type]


def problems(pieces: list[Piece]) -> list[list[tuple[list[int], list[int]]]]:
    """Rows and keys of the problems of each tile."""
    return [
        [(rows.tolist(), keys.tolist()) for rows, keys in zip(tile.query.rows(), tile.key.rows(), strict=True)]
        for tile in make_tiles(pieces)
    ]


def test_neighbouring_rows_with_the_same_keys_become_one_run() -> None:
    (tile,) = make_tiles([piece(2, 3, 10, 4), piece(0, 2, 10, 4), piece(5, 1, 10, 4)])
    assert (tile.query.start, tile.query.length, tile.query.num_problems) == (0, 6, 1)


def test_evenly_spaced_rows_with_the_same_keys_become_segments() -> None:
    (tile,) = make_tiles([piece(0, 2, 10, 4), piece(5, 2, 10, 4), piece(10, 2, 10, 4)])
    assert tile.query.rows().tolist() == [[0, 1, 5, 6, 10, 11]]
    assert tile.query.segments == ((3, 5),)


def test_uneven_rows_with_the_same_keys_are_batches_of_their_own() -> None:
    assert problems([piece(0, 2, 10, 4), piece(5, 2, 10, 4), piece(9, 2, 10, 4)]) == [
        [([0, 1], [10, 11, 12, 13])],
        [([5, 6], [10, 11, 12, 13])],
        [([9, 10], [10, 11, 12, 13])],
    ]


def test_triangles_and_first_writers_are_not_joined() -> None:
    assert len(make_tiles([piece(0, 4, 10, 4, CAUSAL), piece(4, 4, 10, 4, CAUSAL)])) == 2
    assert len(make_tiles([piece(0, 4, 10, 4, writes_first=True), piece(4, 4, 10, 4, writes_first=True)])) == 2


def test_equal_shapes_at_equal_distances_become_one_batch_of_strides() -> None:
    (tile,) = make_tiles([piece(4 * n, 4, 10 + 6 * n, 5, CAUSAL) for n in range(3)])
    assert tile.query.repeats == ((3, 4),)
    assert tile.key.repeats == ((3, 6),)
    assert tile.query.starts is None


def test_equal_shapes_elsewhere_become_one_batch_of_listed_starts() -> None:
    (tile,) = make_tiles([piece(0, 2, 10, 3), piece(5, 2, 20, 3), piece(7, 2, 14, 3)])
    assert tile.query.starts is not None
    assert tile.query.starts.tolist() == [0, 5, 7]
    assert tile.key.problem_starts().tolist() == [10, 20, 14]


def test_problems_that_share_keys_are_in_different_batches() -> None:
    tiles = problems([piece(0, 2, 10, 3), piece(5, 2, 12, 3), piece(9, 2, 15, 3)])
    assert tiles == [
        [([0, 1], [10, 11, 12]), ([9, 10], [15, 16, 17])],
        [([5, 6], [12, 13, 14])],
    ]


def test_first_writers_come_first() -> None:
    tiles = make_tiles([piece(0, 2, 10, 3), piece(0, 4, 0, 4, CAUSAL, writes_first=True)])
    assert [tile.writes_first for tile in tiles] == [True, False]


def test_a_tile_with_any_corrupted_key_says_so() -> None:
    (tile,) = make_tiles([piece(0, 2, 10, 3), piece(5, 2, 20, 3, corrupted_keys=True)])
    assert tile.meets_corrupted_keys
    (tile,) = make_tiles([piece(0, 2, 10, 3)])
    assert not tile.meets_corrupted_keys


@pytest.mark.parametrize("count, stride, ways", [(1, 3, 1), (6, 5, 1), (6, 4, 1), (6, 3, 2), (6, 1, 4), (2, 1, 2)])
def test_a_repeated_piece_is_as_many_series_as_its_keys_overlap(count: int, stride: int, ways: int) -> None:
    series = piece(0, 2, 10, 4).repeated(count, 7, stride)
    assert len(series) == ways
    starts = sorted(
        (rows[0], keys[0])
        for one in series
        for tile in problems([one])
        for rows, keys in tile
    )  # fmt: skip
    assert starts == [(7 * n, 10 + stride * n) for n in range(count)]


pieces = st.builds(
    piece,
    st.integers(0, 40),
    st.integers(1, 4),
    st.integers(0, 40),
    st.integers(1, 4),
    corrupted_keys=st.booleans(),
)


@given(st.lists(st.tuples(pieces, st.integers(1, 4), st.integers(4, 9), st.integers(1, 9)), max_size=12))
def test_tiles_cover_just_the_pieces_and_share_no_row_and_no_key(
    drawn: list[tuple[Piece, int, int, int]],
) -> None:
    given_pieces = [one for first, count, row, key in drawn for one in first.repeated(count, row, key)]
    expected, got = np.zeros((100, 100), dtype=int), np.zeros((100, 100), dtype=int)
    for first, count, row, key in drawn:
        for number in range(count):
            rows, keys = first.row + number * row, first.key + number * key
            expected[rows : rows + first.num_rows, keys : keys + first.num_keys] += 1
    for tile in make_tiles(given_pieces):
        all_rows, all_keys = tile.query.rows(), tile.key.rows()
        for rows, keys in zip(all_rows, all_keys, strict=True):
            got[np.ix_(rows, keys)] += 1
        # Pieces may share keys at different rows, so only what a batch holds is told apart.
        assert len(np.unique(all_keys)) == all_keys.size
        assert len(np.unique(all_rows)) == all_rows.size
    assert (got == expected).all()
