# SPDX-License-Identifier: Apache-2.0
"""What Megatron checks late or words badly is said by the flags that the user gave."""

import importlib.util
from pathlib import Path

import pytest

from megatron_csbp.configuration.training_rules import check_training
from tests.support.megatron_arguments import VALID, parse

RUN = (
    f"{VALID} --tokenizer-type NullTokenizer --vocab-size 100 --micro-batch-size 2 --global-batch-size 8 "
    "--train-iters 20 --lr 1e-3"
)


def check(flags: str, world_size: int = 1, base: str = RUN) -> None:
    args, _ = parse(f"{base} {flags}")
    args.world_size, args.rank = world_size, world_size - 1
    check_training(args)


def without(*flags: str) -> str:
    words = RUN.split()
    for flag in flags:
        del words[words.index(flag) : words.index(flag) + 2]
    return " ".join(words)


REFUSED = {
    "a batch that ranks cannot share": (
        "--global-batch-size 9",
        "--global-batch-size 9 must be a multiple of --micro-batch-size 2 x 1 data-parallel rank(s) = 2",
        "--global-batch-size 10",
    ),
    "an evaluation batch of the training's size": (
        "--eval-micro-batch-size 3",
        "--global-batch-size 8 must be a multiple of --eval-micro-batch-size 3",
        "--global-batch-size 9",
    ),
    "an evaluation batch of its own": (
        "--eval-global-batch-size 7",
        "--eval-global-batch-size 7 must be a multiple of --micro-batch-size 2",
        "--eval-global-batch-size 8",
    ),
    "an empty micro-batch": ("--micro-batch-size 0", "--micro-batch-size 0 must be at least 1"),
    "a warm-up as long as training": (
        "--lr-warmup-iters 20",
        "--lr-warmup-iters 20 must be below --train-iters 20",
        "--lr-warmup-iters 2.",
    ),
    "a warm-up as long as the decay": (
        "--lr-warmup-iters 10 --lr-decay-iters 10",
        "--lr-warmup-iters 10 must be below --lr-decay-iters 10",
    ),
    "a warm-up of everything": ("--lr-warmup-fraction 1.0", "--lr-warmup-fraction 1.0 must be at least 0 and below 1"),
    "a lowest rate above the highest": ("--min-lr 1", "--min-lr 1.0 must lie between 0 and --lr 0.001"),
    "a first rate above the highest": ("--lr-warmup-init 1", "--lr-warmup-init 1.0 must not be above --lr 0.001"),
    "a WSD without its last part": ("--lr-decay-style WSD", "needs --lr-wsd-decay-iters"),
    "a folder to save in without an interval": ("--save x", "--save x needs --save-interval", "--save-interval 1000"),
    "GPT-2's tokenizer without its files": (
        "--tokenizer-type GPT2BPETokenizer",
        "--tokenizer-type GPT2BPETokenizer needs --vocab-file",
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER",
    ),
    "no heads": ("--num-attention-heads 0", "--num-attention-heads 0 must be at least 1"),
    "a seed that is none": ("--seed 0", "--seed 0 must be at least 1"),
    "fewer than no workers": ("--num-workers -1", "--num-workers -1 must be at least 0"),
    "no rotary base": ("--rotary-base 0", "--rotary-base 0 must be above 0", "10000"),
    "no rotary dims": ("--rotary-percent 0", "--rotary-percent 0.0 must be above 0", "1.0"),
    "no tensor-parallel rank": ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size 0 must be at least 1"),
    "a tokenizer folder that is not there": (
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model /none",
        "--tokenizer-model /none does not exist here",
        "tokenizer.json",
    ),
    "a tokenizer without a folder": (
        "--tokenizer-type HuggingFaceTokenizer",
        "--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model",
    ),
    "a tokenizer file that is not there": (
        "--tokenizer-type SentencePieceTokenizer --tokenizer-model org/none",
        "--tokenizer-model org/none is not a file here",
    ),
    "PyTorch's profiler without a folder": ("--profile --use-pytorch-profiler", "writes beside --tensorboard-dir"),
    "a W&B project without a run": ("--wandb-project p", "--wandb"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str) -> None:
    flags, *said = REFUSED[case]
    with pytest.raises(ValueError, match="--") as error:
        check(flags)
    assert [part for part in said if part not in str(error.value)] == []


@pytest.mark.parametrize(
    "left_out, message",
    [
        ("--tokenizer-type", "--tokenizer-type is not given"),
        ("--micro-batch-size", "--micro-batch-size is not given"),
        ("--train-iters", "neither --train-iters nor --train-samples is given"),
        ("--lr", "--lr is not given"),
    ],
)
def test_refuses_what_is_left_out(left_out: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check("", base=without(left_out))


@pytest.mark.parametrize(
    "flags, package",
    [
        ("--wandb-project p --wandb-exp-name e", "wandb"),
        ("--optimizer muon", "emerging_optimizers"),
        ("--num-distributed-optimizer-instances 2", "einops"),
    ],
)
def test_a_package_that_a_flag_needs_is_named(flags: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    message = f"{flags.split()[0]}.* needs the package {package.replace('_', '-')}, which is not installed: pip "
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=message):
        check(flags)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    check(flags)


def test_data_parallel_ranks_count() -> None:
    check("", world_size=4)
    with pytest.raises(ValueError, match=r"--micro-batch-size 2 x 8 data-parallel rank\(s\) = 16; .*size 16\."):
        check("", world_size=8)
    check("--bp-size 8 --context-parallel-size 8", world_size=8)
    check("--bp-size 8", world_size=8)


@pytest.mark.parametrize(
    "flags",
    [
        "--num-experts 0",  # which Megatron takes for none
        "--lr-warmup-iters 19",
        "--lr-warmup-fraction 0.1",
        "--save x --save-interval 5",
        "--tokenizer-type GPT2BPETokenizer --vocab-file v --merge-file m",
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model Qwen/Qwen3-8B",
        "--eval-micro-batch-size 4",
    ],
)
def test_accepts(flags: str) -> None:
    check(flags)


def test_accepts_a_tokenizer_that_is_there(tmp_path: Path) -> None:
    check(f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}")


def test_evaluation_needs_no_schedule() -> None:
    check("--skip-train --save x", base=without("--lr", "--train-iters"))
