# SPDX-License-Identifier: Apache-2.0
"""Row patterns and tiles on small examples that can be checked by eye."""

import numpy as np

from megatron_csbp.transformer.geometry.tiles import KeySource, MaskKind, RowPattern, Tile


def test_a_pattern_without_repeats_is_one_run() -> None:
    pattern = RowPattern(3, 5)
    assert pattern.rows().tolist() == [[5, 6, 7]]
    assert (pattern.num_problems, pattern.num_rows) == (1, 3)


def test_repeats_are_outermost_first() -> None:
    pattern = RowPattern(2, 1, ((2, 100), (3, 10)))
    assert pattern.rows().tolist() == [[1, 2], [11, 12], [21, 22], [101, 102], [111, 112], [121, 122]]
    assert pattern.problem_starts().tolist() == [1, 11, 21, 101, 111, 121]
    assert pattern.num_problems == 6


def test_segments_are_more_rows_of_the_same_problem() -> None:
    pattern = RowPattern(2, 1, ((2, 100),), ((3, 10),))
    assert pattern.rows().tolist() == [[1, 2, 11, 12, 21, 22], [101, 102, 111, 112, 121, 122]]
    assert (pattern.num_problems, pattern.num_rows) == (2, 6)


def test_listed_starts_are_taken_in_place_of_strides() -> None:
    pattern = RowPattern(2, segments=((2, 5),), starts=np.array([7, 0]))
    assert pattern.rows().tolist() == [[7, 8, 12, 13], [0, 1, 5, 6]]
    assert pattern.all_rows.tolist() == [7, 8, 12, 13, 0, 1, 5, 6]
    assert (pattern.num_problems, pattern.num_rows) == (2, 4)


def test_triangles_and_rectangles_are_counted() -> None:
    rows = RowPattern(4, 0, ((3, 4),))
    for mask in (MaskKind.CAUSAL, MaskKind.ANTICAUSAL):
        assert Tile(rows, rows, mask=mask).num_pairs == 3 * 10
    assert Tile(rows, RowPattern(5, 0, ((3, 5),))).num_pairs == 3 * 20


def test_the_kind_says_source_and_mask() -> None:
    rows = RowPattern(1, 0)
    assert Tile(rows, rows).kind == "local full"
    assert Tile(rows, rows, KeySource.GATHERED, MaskKind.ANTICAUSAL).kind == "gathered anticausal"
