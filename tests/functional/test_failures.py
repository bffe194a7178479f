# SPDX-License-Identifier: Apache-2.0
"""A rank fails, hangs or is killed: the others end soon, with a line that says which rank and what."""

import json
import shutil
from pathlib import Path

import pytest

from tests.functional.model_flags import BLOCK_DIFFUSION, CSBP2, TIED, iterations, words
from tests.support.megatron_run import Finished, Ranks, read_records, torchrun

HOOKS = "tests.functional.hooks:"
RUN = [*TIED, *BLOCK_DIFFUSION, *CSBP2, *words("--global-batch-size 1")]
SAVING = [*RUN, *iterations(12), *words("--save-interval 4")]


def check_named(run: Finished, *said: str) -> None:
    """Rank 0 has left by itself, and its last words name rank 1."""
    assert all(run.returncodes), run.returncodes
    assert not run.timed_out
    lines = [line for line in run.output.splitlines() if "OtherRankFailedError: " in line]
    assert len(lines) == 1, run.tail
    assert [part for part in said if part not in lines[0]] == [], lines[0]


@pytest.mark.parametrize(
    "hook, said",
    [
        ("raise_in_the_third_iteration", ["rank 1 (", ") failed: ValueError: a broken sample"]),
        ("die_in_the_third_iteration", ["rank 1 does not answer: killed, or the machine is gone"]),
        pytest.param(
            "die_in_the_third_backward_pass",
            ["rank 1 does not answer: killed, or the machine is gone"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "hang_in_the_third_iteration",
            ["rank 1 (", ") has not come to the collective: it is in hooks.py:", "time.sleep(600)"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_rank_that_fails_is_named_by_the_others(hook: str, said: list[str], ranks: Ranks) -> None:
    run = ranks.train([*RUN, *iterations(50)], 2, hooks=[HOOKS + hook], timeout=120)
    check_named(run, *said)
    assert len(run.losses()) <= 2


@pytest.mark.parametrize(
    "hook, said",
    [
        ("die_in_the_second_checkpoint", "rank 1 does not answer"),
        # The error of the file itself is in the log of the worker that wrote it.
        pytest.param("fill_the_disk_in_the_second_checkpoint", "CheckpointException", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_that_was_not_finished_does_not_count(hook: str, said: str, ranks: Ranks, tmp_path: Path) -> None:
    """The run goes on from the one before, with the losses of an undisturbed run."""
    whole = ranks.train(SAVING, 2).check()
    save = ["--save", str(tmp_path), "--load", str(tmp_path)]
    failed = ranks.train([*SAVING, *save], 2, hooks=[HOOKS + hook], timeout=120)
    assert all(failed.returncodes)
    assert said in failed.output
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert (tmp_path / "iter_0000008").exists()
    resumed = ranks.train([*SAVING, *save], 2).check()
    assert resumed.losses() == whole.losses()[4:]


@pytest.mark.slow
def test_torchrun_starts_again_and_comes_to_the_same_losses(ranks: Ranks, tmp_path: Path) -> None:
    whole = ranks.train(SAVING, 2).check()
    records, save = tmp_path / "records.jsonl", str(tmp_path / "run")
    request = {
        "entry": "pretrain_gpt",
        "arguments": [*SAVING, "--save", save, "--load", save],
        "records": str(records),
        "hooks": [HOOKS + "die_in_the_second_checkpoint"],
    }
    module = ["-m", "tests.support.recorded_entry", json.dumps(request)]
    run = torchrun(["--max-restarts", "1", *module], 2, timeout=600)
    assert run.returncodes == [0], run.tail
    found = [record for record in read_records(records) if record["kind"] == "train"]
    assert [record["iteration"] for record in found] == [*range(1, 9), *range(5, 13)]
    losses = {record["iteration"]: record["losses"]["lm loss"] for record in found}
    assert list(losses.values()) == whole.losses()


@pytest.mark.slow
def test_a_run_whose_newest_checkpoint_is_lost_goes_on_from_the_one_before(ranks: Ranks, tmp_path: Path) -> None:
    save = ["--save", str(tmp_path), "--load", str(tmp_path)]
    whole = ranks.train([*SAVING, *save], 2).check()
    shutil.rmtree(tmp_path / "iter_0000012")
    refused = ranks.train([*SAVING, *save], 2)
    assert refused.returncodes == [2, 2]
    assert "--ckpt-step" in refused.output
    resumed = ranks.train([*SAVING, *save, "--ckpt-step", "8"], 2).check()
    assert resumed.losses() == whole.losses()[8:]
