# SPDX-License-Identifier: Apache-2.0
"""Launch arguments: how many ranks they need, and what the group of ranks is."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_csbp.child_process import Ended
from megatron_csbp.doctor import job, launcher
from megatron_csbp.doctor.findings import State
from megatron_csbp.doctor.gather_speed import _gather_finding, assumed_seconds, context_groups


@pytest.mark.parametrize(
    "words, ranks",
    [
        ("--bp-size 2 --context-parallel-size 2", 2),
        ("--block-parallel-size 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size=3", 24),
        ("--lr 1", 1),
    ],
)
def test_a_job_needs_the_ranks_of_its_sizes(words: str, ranks: int) -> None:
    assert job.least_ranks(words.split()) == ranks


def test_sizes_of_a_file_count_and_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("bp-size: 8\nmodel_parallel:\n  tensor_model_parallel_size: 2\n")
    assert job.least_ranks(["--yaml-cfg", str(file)]) == 16
    assert job.least_ranks(["--yaml-cfg", str(file), "--tensor-model-parallel-size", "1"]) == 8


def test_what_the_check_mode_refuses_is_the_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "megatron_csbp: rank 0: error: --load runs/x has no checkpoint: there is no tracker"
    monkeypatch.setattr(job, "run_python", lambda *words, **environ: Ended(False, "", said))
    (finding,) = job.check_job(["--load", "runs/x"], None).findings
    assert finding.state is State.FAIL
    assert finding.detail == "--load runs/x has no checkpoint: there is no tracker"


def test_the_summary_is_between_its_lines() -> None:
    output = "noise\n------- megatron_csbp 0.1 -------\n  scheme: CSBP\n  last\n----------\nmore"
    assert job._summary(output) == ["  scheme: CSBP", "  last"]
    assert job._summary("nothing") == []


def test_srun_says_who_a_process_is(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = SimpleNamespace(stdout="node01\nnode02\n")
    monkeypatch.setattr(launcher.subprocess, "run", lambda *command, **options: ran)
    environ = {"SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NTASKS": "16", "SLURM_JOB_NODELIST": "node[01-02]"}
    assert launcher.place(environ) == launcher.Place(rank=9, local_rank=1, world_size=16)
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("node01", "29500")
    assert launcher.place({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None
    assert launcher.place({}) is None
    assert launcher.place({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}) == launcher.Place(1, 1, 2)


def test_srun_without_scontrol_says_what_to_export(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/none")
    environ = {"SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NTASKS": "16", "SLURM_JOB_NODELIST": "node[01-02]"}
    with pytest.raises(ValueError, match=r"MASTER_ADDR is not set, and scontrol.*node\[01-02\].*export MASTER_ADDR="):
        launcher.place(environ)
    assert launcher.place(environ | {"MASTER_ADDR": "node01"}) == launcher.Place(9, 1, 16)


def test_context_groups_are_megatrons() -> None:
    assert context_groups(8, tensor=2, context=2) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert context_groups(4, tensor=1, context=4) == [[0, 1, 2, 3]]


def test_a_slow_group_is_named() -> None:
    seconds = [0.001] * 6 + [0.004, 0.001]
    finding = _gather_finding("gather", "nccl", seconds, shard_bytes=1_000_000, context=2, tensor=1)
    assert finding.state is State.WARN
    assert "1.00 GB/s a rank, 4 group(s) at once; the group of ranks [6, 7] takes 4.00 ms" in finding.detail
    assert _gather_finding("gather", "nccl", [0.001] * 8, 1000, 4, 2).state is State.OK


def test_a_gather_is_held_against_what_the_planner_assumes() -> None:
    inside, across = (assumed_seconds("NVIDIA H200", 360_000_000, crosses) for crosses in (False, True))
    assert inside == pytest.approx(0.001 + 15e-6)
    assert across == pytest.approx(0.009 + 30e-6)
    assert assumed_seconds("another", 1, crosses_nodes=False) is None
    slow = _gather_finding("gather", "nccl", [0.002] * 2, 360_000_000, 2, 1, inside)
    assert slow.state is State.WARN
    assert slow.detail.endswith("1 group(s) at once (the planner assumes 1.02 ms)")
    assert _gather_finding("gather", "nccl", [0.0012] * 2, 360_000_000, 2, 1, inside).state is State.OK
