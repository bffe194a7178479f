# SPDX-License-Identifier: Apache-2.0
"""One training step of a small model through the real entry and Megatron, on the path without Transformer Engine."""

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass

from megatron_csbp.tools.gpu_check.settings import Settings

_TIMEOUT_SECONDS = 240

_FLAGS = """
--num-layers 2 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 --group-query-attention
--num-query-groups 2 --kv-channels 64 --swiglu --normalization RMSNorm --disable-bias-linear
--position-embedding-type rope --seq-length 256 --max-position-embeddings 256 --tokenizer-type NullTokenizer
--vocab-size 187 --make-vocab-size-divisible-by 32 --mock-data --num-workers 0 --split 90,5,5 --micro-batch-size 1
--global-batch-size 1 --train-iters 1 --eval-iters 0 --eval-interval 10 --lr 1e-3 --min-lr 1e-4 --lr-decay-iters 10
--log-interval 1 --bf16 --transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion
--no-rope-fusion --no-gradient-accumulation-fusion --no-bias-swiglu-fusion
--diffusion-block-size 32 --mask-token-id 190 --csbp-attention-backend torch
"""

_LOSS = re.compile(r"lm loss: ([-+0-9.Ee]+|nan|inf)")


@dataclass(frozen=True)
class TrainingStep:
    """How the step went.

    Attributes:
        loss: the loss that Megatron logged; None if it logged none.
        error: what went wrong; empty if nothing did.
    """

    loss: float | None
    error: str


def training_step(settings: Settings) -> TrainingStep:
    """Run one step in a process of its own.

    Args:
        settings: says on which device.
    """
    device = "cpu" if settings.device.type == "cpu" else "cuda"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command += ["-m", "megatron_csbp.pretrain_gpt", "--device", device, *_FLAGS.split()]
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = subprocess.run(
                command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False, cwd=folder
            )
        except subprocess.TimeoutExpired:
            return TrainingStep(None, f"the training step took more than {_TIMEOUT_SECONDS} seconds")
    output = run.stdout + run.stderr
    found = _LOSS.findall(output)
    loss = float(found[-1]) if found else None
    if run.returncode or loss is None or not 0 < loss < 100:
        end = "\n".join(output.splitlines()[-30:])
        return TrainingStep(loss, f"the training step ended with status {run.returncode} and loss {loss}:\n{end}")
    return TrainingStep(loss, "")
