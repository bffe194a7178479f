# SPDX-License-Identifier: Apache-2.0
"""A user's mistake ends every rank at once, with one line that names it, before any collective.

The rules themselves are tested one by one in `tests/unit_tests/configuration/test_argument_rules.py`.
"""

from pathlib import Path

import pytest

from tests.functional.model_flags import BLOCK_DIFFUSION, CSBP2, MODEL, TIED, iterations, words
from tests.support.megatron_run import Finished, Ranks, torchrun

QUICK_SECONDS = 120.0
RUN = [*TIED, *BLOCK_DIFFUSION, *CSBP2, *iterations(1)]


def check_refused(run: Finished, *said: str) -> None:
    """Every rank has left by itself, one of them with the message, and none has a traceback or a process group."""
    assert set(run.returncodes) == {2}, run.tail
    assert not run.timed_out
    assert [part for part in said if part not in run.output] == [], run.tail
    assert "Traceback" not in run.output
    assert "initialized tensor model parallel" not in run.output


BROKEN = {
    "a length that does not divide": (["--seq-length", "72"], "--seq-length 72 must be a multiple", "64 or 96"),
    "a mask id outside the vocabulary": (
        ["--mask-token-id", "192"],
        "--mask-token-id 192 is outside the padded vocabulary of 192 tokens",
    ),
    "unequal sizes": (
        ["--context-parallel-size", "4"],
        "--block-parallel-size 2 differs from --context-parallel-size 4",
    ),
    "a feature that is not supported": (["--sft"], "--sft is not supported with --diffusion-block-size"),
    "an unknown flag": (["--difusion-block-size", "8"], "unrecognized arguments: --difusion-block-size"),
    "an unknown objective": (["--diffusion-objective", "other"], "invalid choice: 'other'"),
    "a missing YAML file": (["--yaml-cfg", "none.yaml"], "--yaml-cfg none.yaml", "No such file"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_every_rank_refuses(case: str, ranks: Ranks) -> None:
    flags, *said = BROKEN[case]
    check_refused(ranks.train([*RUN, *flags], 2, timeout=QUICK_SECONDS), *said)


def test_every_rank_refuses_a_device_that_a_file_names_too_late(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("device: cuda")
    run = ranks.train([*RUN, "--yaml-cfg", str(tmp_path / "run.yaml")], 2, timeout=QUICK_SECONDS)
    check_refused(run, "--device cuda in a --yaml-cfg file comes too late", "--device cuda on the command line")


def test_every_rank_refuses_data_that_are_not_there(ranks: Ranks, tmp_path: Path) -> None:
    flags = [word for word in RUN if word != "--mock-data"]
    run = ranks.train([*flags, "--data-path", str(tmp_path / "none")], 2, timeout=QUICK_SECONDS)
    check_refused(run, "--data-path", str(tmp_path / "none"))


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--diffusion-block-size 16", "--diffusion-block-size 16 differs from 8 in the checkpoint"),
        ("--mask-token-id 189", "--mask-token-id 189 differs from 190 in the checkpoint"),
        ("--diffusion-objective nemotron", "--diffusion-objective nemotron differs from block-diffusion"),
        ("--noise-schedule cosine", "--noise-schedule cosine differs from log-linear in the checkpoint"),
        ("--seq-length 128 --max-position-embeddings 128", "--seq-length 128 differs from 64 in the checkpoint"),
    ],
)
def test_every_rank_refuses_to_resume_another_run(flags: str, said: str, ranks: Ranks, checkpoint: Path) -> None:
    resumed = [*RUN, *iterations(2), *words(flags), "--load", str(checkpoint)]
    run = ranks.train(resumed, 2, timeout=QUICK_SECONDS)
    check_refused(run, said, "--finetune")


@pytest.fixture(scope="module")
def checkpoint(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    ranks.train([*RUN, "--save", str(folder)], 2).check()
    return folder


def test_torchrun_ends_with_the_message() -> None:
    """One rank prints it, not each, and it is the last that torchrun says."""
    run = torchrun(["-m", "megatron_csbp.pretrain_gpt", *RUN, "--seq-length", "72"], 2, timeout=QUICK_SECONDS)
    assert run.returncodes == [1]
    assert not run.timed_out
    said = "error: --seq-length 72 must be a multiple of 2 x 2 ranks"
    printed = [line for line in run.output.splitlines() if line.startswith("megatron_csbp: rank")]
    assert [line.partition(": error")[0] for line in printed] == ["megatron_csbp: rank 0"]
    assert said in run.output.partition("Root Cause")[2]
    assert "<N/A>" not in run.output
    assert "initialized tensor model parallel" not in run.output
    assert "Falling back" not in run.output


def test_the_launcher_refuses_without_a_script(ranks: Ranks) -> None:
    check_refused(ranks.train(MODEL, entry="launch"), "SCRIPT is missing", "usage: torchrun")
    check_refused(ranks.train(["none.py", *MODEL], entry="launch"), "SCRIPT none.py is not a file", "usage: torchrun")
