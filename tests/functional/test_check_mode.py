# SPDX-License-Identifier: Apache-2.0
"""`--csbp-dry-run RANKS` says in one process whether a job would start, and leaves nothing behind."""

from pathlib import Path

import pytest

from tests.functional.model_flags import BLOCK_DIFFUSION, CSBP2, TIED, TP2, iterations, words
from tests.functional.test_bad_input import QUICK_SECONDS
from tests.support.megatron_run import Finished, Ranks

SHARDED = [*TIED, *BLOCK_DIFFUSION, *CSBP2, *TP2, *iterations(2)]


def check(ranks: Ranks, flags: list[str], *more: str, number: str = "16") -> Finished:
    """Run on one process that no launcher started."""
    hooks = ["tests.functional.hooks:forget_the_launcher"]
    flags = [*flags, "--csbp-dry-run", number, *more]
    return ranks.train(flags, hooks=hooks, timeout=QUICK_SECONDS)


def test_a_job_that_would_start_is_said_to(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    outputs = f"--global-batch-size 8 --save {folder} --load {folder} --tensorboard-dir {folder}"
    run = check(ranks, SHARDED, *words(outputs)).check()
    assert "every check passed; this job would start on 16 rank(s)" in run.output
    assert "scheme: CSBP over 2 rank(s); tensor 2 x pipeline 1 x data 4" in run.output
    assert "initialized tensor model parallel" not in run.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--context-parallel-size 16 --bp-size 16", "needs a multiple of 32 ranks, and this job has 16"),
        (
            "--global-batch-size 6",
            "--global-batch-size 6 must be a multiple of --micro-batch-size 1 x 4",
        ),
        ("--global-batch-size 8 --save /proc/none", "--save /proc/none cannot be written into"),
        ("--global-batch-size 8 --load /none", "--load /none has no checkpoint"),
        ("--global-batch-size 8 --seq-length 72", "--seq-length 72 must be a multiple"),
        ("--global-batch-size 8 --hidden-size 66", "hidden_size"),
    ],
)
def test_a_job_that_would_not_start_is_refused(flags: str, said: str, ranks: Ranks) -> None:
    run = check(ranks, SHARDED, *words(flags))
    assert run.returncodes == [2], run.tail
    assert said in run.output
    assert "Traceback" not in run.output


def test_data_that_are_not_there_are_refused(ranks: Ranks) -> None:
    flags = [word for word in SHARDED if word != "--mock-data"]
    run = check(ranks, flags, *words("--global-batch-size 8 --data-path /none"))
    assert run.returncodes == [2], run.tail
    assert "--data-path /none" in run.output


def test_a_plain_run_is_checked_too(ranks: Ranks) -> None:
    flags = [*TIED, *iterations(2), "--global-batch-size", "16"]
    assert "would start on 16 rank(s)" in check(ranks, flags).check().output


def test_flags_that_only_the_job_s_gpus_can_honour_are_left_to_them(ranks: Ranks) -> None:
    flags = [*SHARDED, *words("--global-batch-size 8 --profile")]
    check(ranks, flags).check()
    run = check(ranks, flags, "--device", "cpu")
    assert "--profile is not possible on a CPU" in run.output


@pytest.mark.parametrize("number", ["0", "many"])
def test_the_number_of_ranks_is_a_number(number: str, ranks: Ranks) -> None:
    run = check(ranks, SHARDED, number=number)
    assert run.returncodes == [2], run.tail
    assert f"--csbp-dry-run {number} must be the number of ranks" in run.output
