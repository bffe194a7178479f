# SPDX-License-Identifier: Apache-2.0
"""Would the changed job start, and how is it planned? Without the job's files, for which others stand in."""

import shlex
from collections.abc import Sequence

from megatron_csbp.child_process import run_python

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
    words = [*with_stand_ins(flags), "--csbp-dry-run", str(ranks)]
    ended = run_python("-W", "ignore", "-m", "megatron_csbp.pretrain_gpt", *words)
    return None if ended.succeeded else ended.refusal


def how_to_plan(flags: Sequence[str], unknown: Sequence[str], ranks: int | None) -> str:
    """Return the command that plans the changed job, with what is to be known about it.

    Args:
        flags: of the changed job, with known values.
        unknown: names of flags whose values are not known.
        ranks: of the job; None if they are not known either.
    """
    gpus = f"--gpus {'N' if ranks is None else ranks}"
    if flags[:1] == ["--yaml-cfg"]:
        return f"plan the changed file's memory, bytes and time: python -m megatron_csbp.dry_run FILE {gpus}"
    missing = [flag for flag in dict.fromkeys(unknown) if flag not in _OF_THIS_MACHINE]
    added = f"; add {' '.join(missing)}, whose values the script does not know" if missing else ""
    return (
        f"plan its memory, bytes and time, here with a vocabulary of {_VOCABULARY:,d}{added}: "
        f"python -m megatron_csbp.dry_run {shlex.join(with_stand_ins(flags))} {gpus}"
    )


def with_stand_ins(flags: Sequence[str]) -> list[str]:
    """Replace the flags, with their values, that name files: mock data, and a vocabulary without a file."""
    kept: list[str] = []
    keeps = True
    for word in flags:
        if word.startswith("--"):
            keeps = word not in _OF_THIS_MACHINE
        if keeps:
            kept.append(word)
    return [*kept, *_STAND_INS.split()]
