# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that cannot be read, or is of another run, ends a run with one line before it does anything."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_csbp.megatron_checkpoints import common_state
from tests.functional.model_flags import BLOCK_DIFFUSION, MOE, TIED, iterations, words
from tests.functional.test_bad_input import QUICK_SECONDS, check_refused
from tests.support.megatron_run import Ranks

RUN = [*TIED, *BLOCK_DIFFUSION, *iterations(4)]
CONVERTED = words("--ckpt-convert-format torch --no-load-optim --ckpt-convert-save")
TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of iterations 2 and 4."""
    folder = tmp_path_factory.mktemp("saved")
    ranks.train([*RUN, "--save", str(folder), "--save-interval", "2"]).check()
    return folder


def cut(name: str, kept: float) -> Callable[[Path], None]:
    def shorten(folder: Path) -> None:
        file = folder / "iter_0000002" / name
        content = file.read_bytes()
        file.write_bytes(content[: int(len(content) * kept)])

    return shorten


def write_tracker(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / TRACKER).write_text(text)

    return write


FAULTS = {
    "a tracker that is no number": (write_tracker("ten"), "holds 'ten'", "iterations 2, 4: write 4 into it"),
    "an empty tracker": (write_tracker(""), "holds ''", "write 4 into it"),
    "an empty metadata.json": (cut("metadata.json", 0), "metadata.json is empty or cut off (0 bytes)", "torch_dist"),
    "no metadata.json": (lambda f: (f / "iter_0000002/metadata.json").unlink(), "metadata.json is missing", "Write"),
    "a truncated data file": (cut("__0_0.distcp", 0.5), "__0_0.distcp is truncated", "--ckpt-step 4"),
    "no data file": (lambda f: (f / "iter_0000002/__0_0.distcp").unlink(), "__0_0.distcp is missing", "Copy it again"),
    "a truncated index": (cut(".metadata", 0.5), "iter_0000002 cannot be read", "--ckpt-step 4"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_checkpoint_that_cannot_be_read_is_refused(fault: str, ranks: Ranks, saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    write_tracker("2")(folder)
    damage, *said = FAULTS[fault]
    damage(folder)
    for flag in ("--load", "--use-checkpoint-args --load", "--pretrained-checkpoint"):
        check_refused(ranks.train([*RUN, *flag.split(), str(folder)], timeout=QUICK_SECONDS), str(folder), *said)


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(["--bp-size", "2"], id="bp2", marks=pytest.mark.slow),
        pytest.param(words("--bp-size 2 --context-parallel-size 2"), id="csbp2"),
    ],
)
def test_a_checkpoint_carries_the_clean_length(size: list[str], ranks: Ranks, tmp_path: Path) -> None:
    """Stock Megatron would train on the row count: 128 under CSBP, 192 under pure block parallelism."""
    ranks.train([*RUN, *size, "--save", str(tmp_path)], 2).check()
    saved = common_state(tmp_path / "iter_0000004")["args"]
    assert (saved.seq_length, saved.clean_seq_length) == (64, 64)


def test_a_release_keeps_the_rules(ranks: Ranks, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "iter_0000004", tmp_path / "release")
    write_tracker("release")(tmp_path)
    run = [*RUN, "--load", str(tmp_path)]
    check_refused(
        ranks.train([*run, *words("--diffusion-block-size 16")], timeout=QUICK_SECONDS),
        "--diffusion-block-size 16 differs from 8",
        "--finetune",
    )
    assert len(ranks.train(run).check().losses()) == 4


def test_the_legacy_format_keeps_the_rules(ranks: Ranks, saved: Path, tmp_path: Path) -> None:
    ranks.train([*RUN, "--load", str(saved), *CONVERTED, str(tmp_path), "--skip-train"])
    run = [*RUN, "--load", str(tmp_path / "torch"), "--no-load-optim", "--no-load-rng", *words("--train-iters 6")]
    refused = ranks.train([*run, *words("--diffusion-block-size 16 --mask-token-id 189")], timeout=QUICK_SECONDS)
    check_refused(refused, "--diffusion-block-size 16 differs from 8", "--finetune")
    assert len(ranks.train(run).check().losses()) == 2


def test_weights_of_another_model_are_refused_whichever_flag_brings_them(ranks: Ranks, saved: Path) -> None:
    """The scrambled query, key and value weights had the right sizes."""
    heads = words("--num-attention-heads 2 --num-query-groups 1 --kv-channels 32")
    for load in (["--pretrained-checkpoint", str(saved)], ["--finetune", "--load", str(saved)]):
        run = ranks.train([*RUN, *heads, *load], timeout=QUICK_SECONDS)
        check_refused(run, "--num-attention-heads 2 differs from 4", f"{load[-2]} {saved} names")


def test_weights_that_the_arguments_do_not_tell_of_are_compared_by_name(
    ranks: Ranks, saved: Path, tmp_path: Path
) -> None:
    """Arguments of another tool's checkpoint may say nothing of a bias."""
    run = ranks.train(
        [*RUN, "--add-qkv-bias", "--finetune", "--load", str(saved)],
        hooks=["tests.functional.hooks:forget_the_saved_biases"],
        timeout=QUICK_SECONDS,
    )
    assert run.returncodes == [2], run.tail
    assert "it lacks decoder.layers.self_attention.linear_qkv.bias. Use the model flags" in run.output
    assert "Traceback" not in run.output


def test_a_finished_run_is_not_finished_again(ranks: Ranks, saved: Path) -> None:
    run = ranks.train([*RUN, "--load", str(saved)], timeout=QUICK_SECONDS)
    check_refused(run, "has done 4 of --train-iters 4: nothing is left to train", "--override-opt-param-scheduler")
    longer = ranks.train([*RUN, "--load", str(saved), "--override-opt-param-scheduler", "--train-iters", "6"]).check()
    assert [record["iteration"] for record in longer.records] == [5, 6]


def test_the_summary_says_what_a_run_starts_from(ranks: Ranks, saved: Path, tmp_path: Path) -> None:
    changed = words("--rotary-base 500000 --norm-epsilon 1e-6 --make-vocab-size-divisible-by 256 --train-iters 1")
    run = ranks.train([*RUN, *changed, "--pretrained-checkpoint", str(saved)]).check()
    assert f"start: a new run from the weights, --pretrained-checkpoint {saved} (iter_0000004)" in run.output
    assert "note: --rotary-base 500000 differs from 10000" in run.output
    assert "note: --norm-epsilon 1e-06 differs from 1e-05" in run.output
    assert "note: the embedding grows from 192 to 256 rows: Megatron starts the added ones at 0" in run.output


def test_a_forgotten_shared_expert_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    flags = [*MOE, *BLOCK_DIFFUSION, *iterations(2)]
    ranks.train([*flags, "--save", str(tmp_path), *words("--moe-shared-expert-intermediate-size 32")]).check()
    run = ranks.train([*flags, *iterations(3), "--load", str(tmp_path)], timeout=QUICK_SECONDS)
    check_refused(run, "Add --moe-shared-expert-intermediate-size 32")
