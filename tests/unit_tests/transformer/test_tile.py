# SPDX-License-Identifier: Apache-2.0
"""Row patterns and tiles on small examples that can be checked by eye."""

from megatron_csbp.transformer.tile import MaskKind, RowPattern, Tile, TileKind


def test_a_pattern_without_repeats_is_one_run() -> None:
    assert RowPattern(5, 3).rows().tolist() == [[5, 6, 7]]
    assert RowPattern(5, 3).num_runs == 1


def test_repeats_are_outermost_first() -> None:
    pattern = RowPattern(1, 2, ((2, 100), (3, 10)))
    assert pattern.rows().tolist() == [[1, 2], [11, 12], [21, 22], [101, 102], [111, 112], [121, 122]]
    assert pattern.num_runs == 6


def test_a_causal_tile_counts_its_triangle_and_a_full_one_its_rectangle() -> None:
    rows = RowPattern(0, 4, ((3, 4),))
    assert Tile(TileKind.CLEAN_DIAGONAL, rows, rows, mask=MaskKind.CAUSAL).num_pairs == 3 * 10
    assert Tile(TileKind.STAIRCASE, rows, RowPattern(0, 5, ((3, 5),))).num_pairs == 3 * 20


def test_only_diagonal_tiles_write_first() -> None:
    rows = RowPattern(0, 1)
    assert {kind for kind in TileKind if Tile(kind, rows, rows).writes_first} == {
        TileKind.CLEAN_DIAGONAL,
        TileKind.CORRUPTED_DIAGONAL,
    }
