# SPDX-License-Identifier: Apache-2.0
"""An existing script, migrated by the command, passes the check of a start; one that cannot start says why."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.megatron_run import ROOT, environment

SCRIPT = """#!/bin/bash
MODEL=(--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length {length} --max-position-embeddings 8192
    --position-embedding-type rope --attention-dropout 0.1)
TRAINING=(--micro-batch-size 1 --global-batch-size 8 --lr 1e-4 --train-iters 10 --eval-interval 10 --eval-iters 1
    --bf16 --tensor-model-parallel-size 2 --sequence-parallel --delay-grad-reduce)
PATHS=(--data-path $1 --save $2 --load $2 --save-interval 5 --split 90,5,5)
torchrun --nproc-per-node 8 pretrain_gpt.py "${{MODEL[@]}}" "${{TRAINING[@]}}" "${{PATHS[@]}}"
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "length, ranks, status, said",
    [
        (4096, 8, 0, "Nothing stands in the way."),
        (4096, 4, 1, "needs a multiple of 8 ranks"),
        (4000, 8, 1, "--seq-length 4000 must be a multiple of 2 x 4 ranks x block size 32 = 256: use 3840 or 4096"),
    ],
)
def test_the_command_asks_the_check_mode(length: int, ranks: int, status: int, said: str, tmp_path: Path) -> None:
    file = tmp_path / "job.sh"
    file.write_text(SCRIPT.format(length=length))
    command = [sys.executable, "-m", "megatron_csbp.migrate", str(file), "--context-size", "4", "--ranks", str(ranks)]
    run = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert run.returncode == status, run.stdout + run.stderr
    assert run.stdout.startswith(f"--- {file}\n+++ {file}\n@@ ")
    assert said in run.stdout
    assert file.read_text() == SCRIPT.format(length=length), "nothing is written"
