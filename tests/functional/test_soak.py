# SPDX-License-Identifier: Apache-2.0
"""`make soak` in short: nothing grows in a run, and what judges it notices what does."""

from pathlib import Path

import pytest

from tests.support.megatron_run import Ranks
from tests.support.soak import Noted, grown, noise_problem, problems, soak

ITERATIONS = 60


def test_nothing_grows_in_a_run_with_evaluations_and_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    run, noted = soak(ranks, ITERATIONS, tmp_path)
    assert [len(of_rank) for of_rank in noted] == [ITERATIONS] * 2
    assert problems(run, noted, ITERATIONS) == []
    assert len(list((tmp_path / "run").glob("iter_*"))) == 5
    assert len(run.evaluated("nelbo")) >= 5


def flat(number: int) -> Noted:
    return Noted(500.0 + number % 3, 40.0 + number % 2, 12.0, 30.0 + number % 5, 90.0)


def test_a_flat_run_is_found_flat() -> None:
    assert grown([flat(number) for number in range(1000)]) == []


@pytest.mark.parametrize(
    "leak, said",
    [
        ({"resident_mib": 0.05}, "resident MiB: "),
        ({"open_files": 0.01}, "open files: "),
        ({"threads": 0.005}, "threads: "),
        ({"processor_time": 0.02}, "processor time: "),
    ],
)
def test_a_leak_is_found_by_name(leak: dict[str, float], said: str) -> None:
    ((name, each),) = leak.items()
    noted = [flat(n)._replace(**{name: getattr(flat(n), name) + each * n}) for n in range(1000)]
    (line,) = grown(noted)
    assert line.startswith(said)


def test_noise_that_masks_too_little_is_found() -> None:
    fair = [0.3, 0.5, 0.7] * 100
    assert noise_problem(fair) is None
    assert noise_problem([share - 0.05 for share in fair]) is not None
