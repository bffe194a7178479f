# SPDX-License-Identifier: Apache-2.0
"""Would the changed job start? The check mode of the entry, in a process of its own, without the job's files."""

import os
import subprocess
import sys
from collections.abc import Sequence

_ERROR = ": error: "
_OF_THIS_MACHINE = (
    "--data-path",
    "--train-data-path",
    "--valid-data-path",
    "--test-data-path",
    "--data-args-path",
    "--per-split-data-args-path",
    "--data-cache-path",
    "--vocab-file",
    "--merge-file",
    "--tokenizer-model",
    "--tokenizer-type",
    "--tiktoken-pattern",
    "--vocab-size",
    "--save",
    "--load",
    "--pretrained-checkpoint",
    "--tensorboard-dir",
    "--wandb-save-dir",
    "--mask-token-id",
    "--mock-data",
)
"""Flags that name files, or go by them: the machine that migrates a script need not have any."""
_VOCABULARY = 151_936
# The stand-in ends documents with its last token.
_STAND_INS = f"--mock-data --tokenizer-type NullTokenizer --vocab-size {_VOCABULARY} --mask-token-id {_VOCABULARY - 9}"


def refusal(flags: Sequence[str], ranks: int) -> str | None:
    """Return why the job would not start; None if it would.

    Args:
        flags: of the changed job, with known values.
        ranks: of the job.
    """
    words = [*without_files(flags), *_STAND_INS.split(), "--csbp-dry-run", str(ranks)]
    command = [sys.executable, "-W", "ignore", "-m", "megatron_csbp.pretrain_gpt", *words]
    environ = os.environ | {"TORCHELASTIC_ERROR_FILE": ""}
    run = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if run.returncode == 0:
        return None
    lines = [line for line in run.stderr.splitlines() if line.strip()]
    said = next((line.partition(_ERROR)[2] for line in reversed(lines) if _ERROR in line), "")
    return said or (lines[-1] if lines else f"status {run.returncode}")


def without_files(flags: Sequence[str]) -> list[str]:
    """Leave out the flags, with their values, that name files."""
    kept: list[str] = []
    keeps = True
    for word in flags:
        if word.startswith("--"):
            keeps = word not in _OF_THIS_MACHINE
        if keeps:
            kept.append(word)
    return kept
