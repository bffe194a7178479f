# SPDX-License-Identifier: Apache-2.0
"""Would the changed job start? The check mode of the entry, in a process of its own, without the job's files."""

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
VOCABULARY = 151_936
"""Tokens of the vocabulary that stands in."""
# The stand-in ends documents with its last token.
_STAND_INS = f"--mock-data --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --mask-token-id {VOCABULARY - 9}"


def refusal(flags: Sequence[str], ranks: int) -> str | None:
    """Return why the job would not start; None if it would.

    Args:
        flags: of the changed job, with known values.
        ranks: of the job.
    """
    words = [*with_stand_ins(flags), "--csbp-dry-run", str(ranks)]
    ended = run_python("-W", "ignore", "-m", "megatron_csbp.pretrain_gpt", *words)
    return None if ended.succeeded else ended.refusal


def with_stand_ins(flags: Sequence[str]) -> list[str]:
    """Replace the flags, with their values, that name files: mock data, and a vocabulary of `VOCABULARY`."""
    kept: list[str] = []
    keeps = True
    for word in flags:
        if word.startswith("--"):
            keeps = word not in _OF_THIS_MACHINE
        if keeps:
            kept.append(word)
    return [*kept, *_STAND_INS.split()]
