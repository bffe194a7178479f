# SPDX-License-Identifier: Apache-2.0
"""Batches without anything to learn are no fault; killed ranks and NaN are, and end the run by name."""

import json
import math
from pathlib import Path

import pytest

from tests.functional.model_flags import BLOCK_DIFFUSION, CSBP2, NEMOTRON, TIED, UNTIED_MQA, iterations, words
from tests.support.megatron_run import Finished, Ranks, torchrun, worst_difference

HOOKS = "tests.functional.hooks:"
CURVE_TOLERANCE = 2e-6


def check_finite(run: Finished, number: int) -> None:
    run.check()
    assert len(run.losses()) == number
    assert all(math.isfinite(value) for record in run.records for value in record["losses"].values())
    assert all(math.isfinite(norm) for norm in run.grad_norms)
    assert all(record.get("skipped", 0) == 0 for record in run.records)


@pytest.mark.parametrize("objective", [NEMOTRON, BLOCK_DIFFUSION], ids=["nemotron", "block-diffusion"])
def test_a_rank_without_masked_tokens_joins_every_collective(objective: list[str], ranks: Ranks) -> None:
    flags = [*TIED, *objective, *CSBP2, *iterations(3, evaluate=True)]
    check_finite(ranks.train(flags, 2, hooks=[HOOKS + "mask_nothing_on_the_last_rank"], timeout=300), 3)


@pytest.mark.parametrize("hook", ["mask_nothing_in_two_blocks", "mask_nothing_in_odd_samples"])
def test_blocks_and_micro_batches_without_masked_tokens_train_like_one_rank(hook: str, ranks: Ranks) -> None:
    """Odd samples are the second micro-batch of each iteration; two ranks of a context group load the same samples."""
    flags = [*TIED, *BLOCK_DIFFUSION, *iterations(3)]
    one, two = (ranks.train([*flags, *more], n, hooks=[HOOKS + hook]) for more, n in (([], 1), (CSBP2, 2)))
    check_finite(one, 3)
    check_finite(two, 3)
    assert one.losses()[0] != ranks.train(flags).losses()[0]
    assert worst_difference(two.losses(), one.losses()) < CURVE_TOLERANCE
    assert worst_difference(two.grad_norms, one.grad_norms) < CURVE_TOLERANCE


@pytest.mark.parametrize(
    "flags",
    [[*UNTIED_MQA, *BLOCK_DIFFUSION], [*TIED, *NEMOTRON, "--ar-loss-weight", "0"]],
    ids=["block-diffusion", "nemotron"],
)
def test_nothing_masked_anywhere_is_a_loss_of_0(flags: list[str], ranks: Ranks) -> None:
    run = ranks.train([*flags, *CSBP2, *iterations(2, evaluate=True)], 2, hooks=[HOOKS + "mask_nothing"], timeout=300)
    check_finite(run, 2)
    assert run.losses() == run.grad_norms == [0.0, 0.0]
    assert set(run.evaluated("nelbo")) == {0.0}


def test_a_mask_id_that_the_data_hold_is_refused_on_every_rank(ranks: Ranks) -> None:
    """The mock data count 1, 2, 3, ..., so that token 5 is in nearly every sample."""
    flags = [*TIED, *BLOCK_DIFFUSION, "--mask-token-id", "5", *CSBP2, *iterations(5)]
    run = ranks.train(flags, 2, timeout=120)
    assert run.returncodes == [2, 2], run.tail
    assert run.output.count("error: --mask-token-id 5: --mock-data, which counts 1, 2, 3, ..., holds this id") == 2
    assert "Use --mask-token-id 187, a spare row of the padded vocabulary" in run.output


@pytest.mark.parametrize(
    "more",
    [
        pytest.param([], id="with reruns", marks=pytest.mark.slow),
        pytest.param(["--rerun-mode", "disabled"], id="without reruns"),
    ],
)
def test_nan_in_the_loss_of_one_rank_ends_the_run_by_name(more: list[str], ranks: Ranks, tmp_path: Path) -> None:
    flags = [*TIED, *BLOCK_DIFFUSION, *CSBP2, *words("--global-batch-size 1"), *iterations(6), *more]
    run = ranks.train(
        [*flags, "--save", str(tmp_path)], 2, hooks=[HOOKS + "nan_from_the_third_iteration"], timeout=300
    )
    assert all(run.returncodes)
    assert not run.timed_out
    assert "found NaN in local forward loss calculation" in run.output
    assert len(run.losses()) == 2


def test_a_killed_rank_ends_the_run_by_name() -> None:
    flags = [*TIED, *BLOCK_DIFFUSION, *CSBP2, *words("--global-batch-size 1"), *iterations(50)]
    request = {
        "entry": "pretrain_gpt",
        "arguments": flags,
        "records": "/dev/null",
        "hooks": [HOOKS + "die_in_the_third_iteration"],
    }
    run = torchrun(["-m", "tests.support.recorded_entry", json.dumps(request)], 2, timeout=300)
    assert run.returncodes != [0]
    assert not run.timed_out
    assert "Signal 9 (SIGKILL)" in run.output
    assert "exitcode  : -9" in run.output
