# SPDX-License-Identifier: Apache-2.0
"""Plain words for numbers."""

import pytest

from benchmarks.text import span, table, thousands, trend


@pytest.mark.parametrize(
    "values, word",
    [
        ([1.0, 1.2, 1.5], "grows"),
        ([1.5, 1.2, 1.0], "falls"),
        ([1.0, 1.001, 0.999], "stays"),
        ([1.0, 1.5, 1.1], "neither grows nor falls steadily"),
        ([1.0], "stays"),
    ],
)
def test_a_trend_is_said_only_if_every_step_agrees(values: list[float], word: str) -> None:
    assert trend(values) == word


def test_a_span_of_figures_that_look_equal_is_one_figure() -> None:
    assert span([1.001, 1.004]) == "1.00"
    assert span([1.5, 1.0]) == "1.00 to 1.50"


def test_lengths_are_written_in_k_and_m_where_they_are_whole() -> None:
    assert [thousands(n) for n in (512, 4096, 2**20, 1000)] == ["512", "4K", "1M", "1000"]


def test_a_table_aligns_figures_to_the_right() -> None:
    assert table(["a", "b"], [["x", "1"]]) == ["| a | b |", "| --- | ---: |", "| x | 1 |"]
