# SPDX-License-Identifier: Apache-2.0
"""Summaries of timed steps; the timing itself is in tests/functional/test_benchmarks.py."""

import pytest

from benchmarks.stack import CP, CSBP, Checksums
from benchmarks.throughput import Comparison, Timings, summarise

COMPARISON = Comparison(sequence_length=1000, variants=(CP, CSBP), repeats=3)


def timings(steps: list[float], blocked: float, alone: float, loss: float = 1.0) -> Timings:
    return Timings(steps, [blocked] * len(steps), [alone] * len(steps), [Checksums(loss, 2.0)])


def test_a_step_takes_as_long_as_its_slowest_rank_and_the_median_counts() -> None:
    ranks = [
        {"CP": timings([1.0, 4.0, 2.0], 0.5, 1.5), "CSBP": timings([1.0, 1.0, 1.0], 0.0, 0.5)},
        {"CP": timings([3.0, 1.0, 1.0], 0.5, 1.5), "CSBP": timings([1.0, 1.0, 1.0], 0.0, 0.5)},
    ]
    cp, csbp = summarise(COMPARISON, ranks)
    assert cp["step_seconds"] == 3.0
    assert cp["tokens_per_second"] == pytest.approx(1000 / 3)
    assert (cp["exposed_seconds"], cp["compute_seconds"], cp["hidden_seconds"]) == (0.5, 2.5, 1.0)
    assert csbp["hidden_seconds"] == 0.5


def test_schemes_that_did_not_compute_the_same_are_not_compared() -> None:
    ranks = [{"CP": timings([1.0], 0.0, 0.0), "CSBP": timings([1.0], 0.0, 0.0, loss=1.1)}]
    with pytest.raises(RuntimeError, match="CSBP and CP differ in loss"):
        summarise(COMPARISON, ranks)
