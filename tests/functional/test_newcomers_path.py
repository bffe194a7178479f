# SPDX-License-Identifier: Apache-2.0
"""What a newcomer does first, as the pages print it, step by step against the clock.

From a clone to a conversion on text of one's own (docs/convert.md), and from an existing launch script to a plan for
16 GPUs (docs/migrate.md).
"""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.megatron_run import ROOT
from tests.support.shell import run_commands

pytestmark = pytest.mark.slow

# All steps together take 160 s on two cores that do little else.
MOST_SECONDS = {"train_tokenizer": 30, "prepare": 30, "$TRAIN": 200, "generate": 60, "evaluate": 100}
# Each command is printed before it runs, with the seconds since the start.
ANNOUNCED = "trap 'echo \"@ $SECONDS $BASH_COMMAND\"' DEBUG\n"
JOB = """#!/bin/bash
MODEL=(--num-layers 36 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 32 --kv-channels 128
    --group-query-attention --num-query-groups 8 --qk-layernorm --swiglu --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights --position-embedding-type rope --rotary-base 1000000
    --seq-length 131072 --max-position-embeddings 131072)
TRAINING=(--micro-batch-size 1 --global-batch-size 8 --lr 1e-5 --train-iters 1000 --eval-interval 100 --eval-iters 1
    --bf16 --use-distributed-optimizer --context-parallel-size 8 --recompute-granularity full
    --recompute-method uniform --recompute-num-layers 1)
PATHS=(--data-path $1 --tokenizer-type HuggingFaceTokenizer --tokenizer-model $2 --save $3 --save-interval 100)
torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py "${MODEL[@]}" "${TRAINING[@]}" "${PATHS[@]}"
"""


def test_from_a_clone_to_a_conversion_on_text_of_ones_own(tmp_path: Path) -> None:
    (commands,) = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/convert.md").read_text(), flags=re.DOTALL)
    output = run_commands(f"{ANNOUNCED}{commands}\n:\n", tmp_path)
    starts = re.findall(r"^@ (\d+) (.*)", output, flags=re.MULTILINE)
    steps = [(int(after) - int(start), command) for (start, command), (after, _) in pairwise(starts)]
    timed = [(seconds, name) for seconds, command in steps for name in MOST_SECONDS if name in command.split("--")[0]]
    assert [name for _, name in timed] == ["train_tokenizer", "prepare", "$TRAIN", "$TRAIN", "generate", "evaluate"]
    assert all(seconds <= MOST_SECONDS[name] for seconds, name in timed), timed
    autoregressive, converted = (float(value) for value in re.findall(r"lm loss value: (\S+) \|", output)[-2:])
    (bound,) = re.findall(r"nelbo value: (\S+) \|", output)[-1:]
    assert autoregressive < 5.6  # 6.24 knows no token from another
    assert converted < 6.0
    assert float(bound) < converted  # which counts heavily masked blocks more
    assert re.search(r"^NELBO \d+\.\d+ nats/token; \d+ samples of 256 tokens; mine/converted$", output, re.MULTILINE)


def test_from_a_launch_script_to_a_plan_for_16_gpus(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(JOB)
    run_commands("python -m megatron_csbp.migrate job.sh --ranks 16 > change.diff", tmp_path)
    migrated = (tmp_path / "change.diff").read_text()
    assert "Nothing stands in the way." in migrated
    run_commands("patch --quiet job.sh < change.diff", tmp_path)
    assert "-m megatron_csbp.launch pretrain_gpt.py --bp-size 8" in (tmp_path / "job.sh").read_text()
    (command,) = re.findall(r"plan its memory, bytes and time.*: (python .* --gpus 16)$", migrated, re.MULTILINE)
    planned = run_commands(command, tmp_path)
    assert "dry run: 16 x h200, 2 node(s) of 8; DP 2 x CSBP 8" in planned
    assert "parameters: 8,190,735,360 (Qwen3 8B, as published)" in planned
    assert "every check of a start passed" in planned
