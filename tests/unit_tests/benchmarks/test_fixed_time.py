# SPDX-License-Identifier: Apache-2.0
"""Curves from Megatron's log, and what two runs had reached at the same time."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.fixed_time import Corpus, FixedTime, at_common_time, command_line, largest_difference, read_curves

LOG = (
    " [2026-01-01 00:00:00.0] iteration        1/      80 | consumed samples: 4 | elapsed time per iteration "
    "(ms): 1500.0 | learning rate: 6.0E-04 | global batch size:     4 | lm loss: 7.441084E+00 | loss scale: 1.0 |\n"
    " validation loss at iteration 1 | lm loss value: 7.4E+00 | lm loss PPL: 1.7E+03 | nelbo value: 7.300000E+00 | "
    "nelbo PPL: 1.7E+03 |\n"
    " [2026-01-01 00:00:02.0] iteration        2/      80 | consumed samples: 8 | elapsed time per iteration "
    "(ms): 500.0 | learning rate: 6.0E-04 | global batch size:     4 | lm loss: 7.0E+00 | loss scale: 1.0 |\n"
    " validation loss at iteration 2 on validation set | lm loss value: 7.0E+00 | lm loss PPL: 1.7E+03 | nelbo value: "
    "6.9E+00 | nelbo PPL: 9E+02 |\n"
)


def run(scheme: str, seconds_per_iteration: float, losses: list[float]) -> dict[str, Any]:
    points = [
        {"iteration": i + 1, "seconds": (i + 1) * seconds_per_iteration, "loss": loss} for i, loss in enumerate(losses)
    ]
    return {
        "scheme": scheme,
        "iterations": points,
        "validations": points,
    }


def test_the_clock_adds_up_iterations_and_stands_still_during_validation() -> None:
    curves = read_curves(LOG)
    assert [(point["iteration"], point["seconds"], point["loss"]) for point in curves["iterations"]] == [
        (1, 1.5, 7.441084),
        (2, 2.0, 7.0),
    ]


def test_the_validation_after_the_end_is_not_a_point_of_the_curve() -> None:
    assert read_curves(LOG)["validations"] == [{"iteration": 1, "seconds": 1.5, "loss": 7.4, "nelbo": 7.3}]


def test_runs_are_compared_when_the_shorter_clock_stops() -> None:
    common = at_common_time([run("CP", 2.0, [5.0, 4.0, 3.0]), run("CSBP", 1.0, [5.0, 4.0, 3.0, 2.0, 1.0])])
    assert common["seconds"] == 5.0
    assert common["reached"]["CP"]["loss"] == 4.0
    assert common["reached"]["CSBP"]["loss"] == 1.0


def test_the_difference_of_two_runs_is_taken_at_equal_iterations() -> None:
    first, second = run("CP", 2.0, [5.0, 4.0]), run("CSBP", 1.0, [5.0, 4.4, 9.0])
    assert largest_difference([first, second]) == pytest.approx(0.1 * 4 / 4.4)


def test_the_two_command_lines_differ_only_in_the_scheme() -> None:
    corpus = Corpus(Path("tokenizer"), ["--data-path", "text"], mask_token_id=1)
    cp, csbp = (command_line(scheme, FixedTime(), corpus) for scheme in ("CP", "CSBP"))
    assert [flag for flag in csbp if flag not in cp] == ["--bp-size"]
