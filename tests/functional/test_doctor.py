# SPDX-License-Identifier: Apache-2.0
"""The doctor looks at real launch arguments, and at ranks that torchrun has started."""

import json
import sys
from pathlib import Path

import pytest

from tests.functional.model_flags import BLOCK_DIFFUSION, CSBP2, TIED, TP2, iterations, words
from tests.support.megatron_run import Ranks, torchrun

JOB = [*TIED, *BLOCK_DIFFUSION, *CSBP2, *iterations(2)]


def resolve(ranks: Ranks, file: Path, *more: str) -> str:
    request = {"module": "megatron_csbp.doctor.resolve", "arguments": [str(file), "4", *JOB, *TP2, *more]}
    return ranks.call("tests.support.command:run", request).output


def test_launch_arguments_come_to_their_whole_configuration(ranks: Ranks, tmp_path: Path) -> None:
    output = resolve(ranks, tmp_path / "resolved.json", "--save", str(tmp_path / "run"))
    assert "every check passed; this job would start on 4 rank(s)" in output
    found = json.loads((tmp_path / "resolved.json").read_text())
    assert (found["tensor"], found["context"]) == (2, 2)
    assert found["folders"] == [str(tmp_path / "run")]
    arguments = found["arguments"]
    assert len(arguments) > 500
    assert arguments["--block-parallel-size"] == "2"
    assert arguments["--clean-attention"] == "block-causal"  # which the objective chose
    # 32 clean rows of the other rank, keys and values of one head of 16 numbers in fp32.
    assert found["gather_bytes"] == 32 * 2 * 1 * 16 * 4


def test_launch_arguments_that_would_not_start_leave_no_configuration(ranks: Ranks, tmp_path: Path) -> None:
    output = resolve(ranks, tmp_path / "resolved.json", *words("--seq-length 72"))
    assert "error: --seq-length 72 must be a multiple" in output
    assert not (tmp_path / "resolved.json").exists()


@pytest.mark.slow
def test_ranks_of_torchrun_are_looked_at_together(tmp_path: Path) -> None:
    run = torchrun(["-m", "megatron_csbp.doctor", "--folder", str(tmp_path), "--json", *JOB], 2, timeout=600)
    assert run.returncodes == [0], run.tail
    report = json.loads(run.output[run.output.index("{\n") : run.output.rindex("\n}") + 2])
    assert report["sound"]
    details = {finding["name"]: finding["detail"] for finding in report["findings"]}
    assert details["ranks meet"] == "2 rank(s) on 1 machine(s)"
    assert "2 ranks on 1 machine(s) have the same" in details["versions agree"]
    assert "GB/s a rank" in details["all-gather of the context groups"]
    assert "the job would start on 2 rank(s)" in details["launch arguments"]
    assert sys.executable in details["Python"]
    assert list(tmp_path.iterdir()) == []
