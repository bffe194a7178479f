# SPDX-License-Identifier: Apache-2.0
"""Ranks that start differently end within seconds, each with the fields, the values and the ranks."""

from tests.functional.model_flags import BLOCK_DIFFUSION, CSBP2, TIED, iterations
from tests.support.megatron_run import Finished, Ranks

HOOKS = "tests.functional.hooks:"
RUN = [*TIED, *BLOCK_DIFFUSION, *CSBP2, *iterations(1)]
QUICK_SECONDS = 60.0


def check_disagreement(run: Finished, *said: str) -> None:
    """Every rank has left by itself with the same message, before it made a process group."""
    assert run.returncodes == [2] * len(run.returncodes), run.tail
    assert not run.timed_out
    lines = [line.partition(": error: ")[2] for line in run.output.splitlines() if ": error: " in line]
    assert len(lines) == len(run.returncodes), run.tail
    assert len(set(lines)) == 1
    assert [part for part in said if part not in lines[0]] == [], lines[0]
    assert "initialized tensor model parallel" not in run.output


def test_ranks_that_start_otherwise_end_every_rank_by_name(ranks: Ranks) -> None:
    run = ranks.train(RUN, 2, hooks=[HOOKS + "start_otherwise_on_rank_1"], timeout=QUICK_SECONDS)
    check_disagreement(
        run,
        "the ranks of this job do not agree: the version of numpy is",
        "on rank 0 and 1.26.0 on rank 1; ",
        "--lr is 0.002 on rank 0 and 0.001 on rank 1; ",
        "--seed is 7 on rank 0 and 8 on rank 1; ",
        "the noise of the seed is digest",
    )


def test_sizes_with_which_ranks_would_make_other_groups_end_every_rank_by_name(ranks: Ranks) -> None:
    run = ranks.train(RUN, 2, hooks=[HOOKS + "start_with_another_size_on_rank_1"], timeout=QUICK_SECONDS)
    check_disagreement(run, "--tensor-model-parallel-size is 1 on rank 0 and 2 on rank 1")
