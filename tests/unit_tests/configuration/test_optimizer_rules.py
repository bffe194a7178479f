# SPDX-License-Identifier: Apache-2.0
"""A resumed run finds the state of its optimizer again, and keeps its schedule."""

from argparse import Namespace
from typing import Any

import pytest

from megatron_csbp.configuration.optimizer_rules import check_optimizer
from tests.unit_tests.configuration.support import FLAGS, arguments

SCHEDULE = {"lr_warmup_steps": 0, "lr_decay_steps": 40, "lr_decay_style": "linear", "wd_incr_steps": 40}


def check(flags: str = "", saved: Namespace | None = None, sharding: str | None = None, **changes: Any) -> None:
    content = {} if sharding is None else {"content_metadata": {"distrib_optim_sharding_type": sharding}}
    state = content | {"opt_param_scheduler": SCHEDULE}
    check_optimizer(arguments(flags, **changes), saved or arguments(), state, "--load folder", FLAGS)


def test_the_same_run_resumes() -> None:
    check()


@pytest.mark.parametrize(
    "flags",
    ["--bf16", "--use-distributed-optimizer", "--lr 2e-3", "--min-lr 1e-4", "--decoupled-lr 1e-3", "--optimizer sgd"],
)
def test_an_optimizer_whose_state_would_not_be_found_is_refused(flags: str) -> None:
    message = rf"^{flags.split()[0]} .*its optimizer state does not fit\. (Use|Leave out) --.*, or --no-load-optim"
    with pytest.raises(ValueError, match=message):
        check(flags)
    check(f"{flags} --no-load-optim")


def test_a_checkpoint_without_optimizer_state_is_refused() -> None:
    saved = arguments("--no-save-optim")
    with pytest.raises(ValueError, match=r"was saved with --no-save-optim: there is no optimizer state.*--no-load"):
        check(saved=saved)
    check("--no-load-optim", saved=saved)


@pytest.mark.parametrize("name", ["tensor_model_parallel_size", "pipeline_model_parallel_size", "padded_vocab_size"])
def test_another_division_needs_a_distributed_optimizer_that_was_saved_for_it(name: str) -> None:
    flags = "--use-distributed-optimizer"
    given = {"saved": arguments(flags), name: 256}
    with pytest.raises(ValueError, match=r"saved as dp_reshardable, which .* --dist-ckpt-optim-fully-reshardable"):
        check(flags, sharding="dp_reshardable", **given)
    check(flags, sharding="fully_reshardable", **given)
    check(f"{flags} --no-load-optim", sharding="dp_reshardable", **given)


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--train-iters 30", "--train-iters 30 differs from 20 in .* Use --train-iters 20;"),
        ("--global-batch-size 4", "--global-batch-size 4 differs from 2"),
        ("--lr-warmup-iters 3", "--lr-warmup-iters 3 differs from 0"),
        ("--lr-decay-iters 15", "--lr-decay-iters 15 is given and was not"),
        ("--lr-decay-style cosine", "--lr-decay-style cosine differs from linear"),
        (
            "--train-iters 30 --global-batch-size 4",
            "--train-iters 30 differs from 20 and --global-batch-size 4 differs from 2",
        ),
    ],
)
def test_another_schedule_is_refused_with_both_remedies(flags: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}") as error:
        check(flags)
    assert "--override-opt-param-scheduler for the schedule of the flags" in str(error.value)
    assert "--use-checkpoint-opt-param-scheduler for that of the checkpoint" in str(error.value)
    check(f"{flags} --override-opt-param-scheduler")
    check(f"{flags} --use-checkpoint-opt-param-scheduler")


def test_a_batch_size_that_leaves_the_schedule_alone_is_accepted() -> None:
    check("--train-iters 10 --global-batch-size 4")
