# SPDX-License-Identifier: Apache-2.0
"""A resumed run keeps what its noise and its loss are made of, and has something to train."""

from argparse import Namespace
from pathlib import Path

import pytest

from megatron_csbp.configuration.checkpoint_rules import check_start, use_checkpoint_length
from tests.unit_tests.configuration.support import FLAGS, Save, arguments, save

__all__ = ["save"]

OTHER = {
    "diffusion_block_size": 16,
    "mask_token_id": 189,
    "diffusion_objective": "nemotron",
    "clean_attention": "token-causal",
    "noise_schedule": "cosine",
    "noise_eps": 1e-2,
    "diffusion_loss_weight": 0.3,
    "ar_loss_weight": 1.0,
    "clean_seq_length": 128,
    "seed": 8,
    "corrupted_views": 2,
    "window_anchor": "block",
    "loss_on": "all",
    "long_documents": "cut",
}


def test_the_same_run_resumes(save: Save) -> None:
    start = check_start(arguments(load=str(save(arguments()))), FLAGS)
    assert start.checkpoint is not None
    assert (start.checkpoint.iteration, start.is_resumed, start.notes) == (10, True, [])


@pytest.mark.parametrize("name", OTHER)
def test_a_resumed_run_keeps_its_noise_and_its_loss(save: Save, name: str) -> None:
    saved = arguments()
    folder = save(saved)
    flag = "--seq-length" if name == "clean_seq_length" else "--" + name.replace("_", "-")
    with pytest.raises(ValueError, match="a run keeps its noise and its loss") as error:
        check_start(arguments(load=str(folder), **{name: OTHER[name]}), FLAGS)
    assert str(error.value).startswith(f"{flag} {OTHER[name]} ")
    assert f"in the checkpoint that --load {folder} resumes" in str(error.value)
    assert "--finetune to start a new run" in str(error.value)
    start = check_start(arguments(load=str(folder), finetune=True, **{name: OTHER[name]}), FLAGS)
    assert not start.is_resumed


@pytest.mark.parametrize("flag", ["--eod-mask-loss", "--pack-documents"])
def test_a_resumed_run_keeps_what_is_on_or_off(save: Save, flag: str) -> None:
    folder = save(arguments())
    with pytest.raises(ValueError, match=f"^{flag} is given and was not .* Leave out {flag}, or --f"):
        check_start(arguments(flag, load=str(folder)), FLAGS)


def test_a_checkpoint_of_the_time_before_these_flags_resumes_with_their_defaults(save: Save) -> None:
    saved = arguments()
    for name in ("corrupted_views", "window_anchor", "pack_documents", "loss_on", "long_documents"):
        delattr(saved, name)
    folder = save(saved)
    assert check_start(arguments(load=str(folder)), FLAGS).is_resumed
    with pytest.raises(ValueError, match=r"--corrupted-views 2 differs from 1"):
        check_start(arguments(load=str(folder), corrupted_views=2), FLAGS)


def test_a_release_is_a_new_run_that_keeps_its_noise(save: Save) -> None:
    folder = save(arguments(), iteration=0)
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    (folder / "iter_0000010").rename(folder / "release")
    with pytest.MonkeyPatch.context() as patch:
        from megatron_csbp import megatron_checkpoints

        patch.setattr(megatron_checkpoints, "common_state", lambda _: {"args": arguments(), "iteration": 0})
        start = check_start(arguments(load=str(folder), lr=2e-3), FLAGS)
        assert start.checkpoint is not None
        assert (start.checkpoint.is_release, start.is_resumed) == (True, False)
        with pytest.raises(ValueError, match="--diffusion-block-size 16 differs from 8"):
            check_start(arguments(load=str(folder), diffusion_block_size=16), FLAGS)
        with pytest.raises(ValueError, match="--hidden-size 128 differs from 64"):
            check_start(arguments(load=str(folder), hidden_size=128), FLAGS)


def test_pretrained_weights_start_a_new_run(save: Save) -> None:
    folder = save(arguments())
    given = {"pretrained_checkpoint": str(folder), "train_iters": 1, "diffusion_block_size": 16, "lr": 2e-3}
    start = check_start(arguments(**given), FLAGS)
    assert start.checkpoint is not None
    assert (start.checkpoint.flag, start.is_resumed) == (f"--pretrained-checkpoint {folder}", False)


@pytest.mark.parametrize(
    "given, done",
    [({"train_iters": 10}, "10 of --train-iters 10"), ({"train_samples": 20, "train_iters": None}, "20 of --train-s")],
)
def test_a_run_with_nothing_left_to_train_is_refused(save: Save, given: dict[str, int], done: str) -> None:
    folder = str(save(arguments(consumed_train_samples=20)))
    with pytest.raises(ValueError, match=f"has done {done}.*: nothing is left to train. Use --finetune") as error:
        check_start(arguments(load=folder, no_load_optim=True, **given), FLAGS)
    assert "--override-opt-param-scheduler" in str(error.value)
    check_start(arguments(load=folder, skip_train=True, **given), FLAGS)


def test_an_autoregressive_checkpoint_with_nothing_left_names_finetune(save: Save) -> None:
    saved = arguments()
    del saved.diffusion_block_size
    folder = str(save(saved))
    start = check_start(arguments(load=folder), FLAGS)
    assert start.is_resumed
    assert start.notes[-1].startswith("an autoregressive run goes on as a block-diffusion one, with its optimizer")
    assert not check_start(arguments(load=folder, finetune=True), FLAGS).notes
    with pytest.raises(ValueError, match=r"of an autoregressive run, whose iterations would count\)\. Use --finetune"):
        check_start(arguments(load=folder, train_iters=10), FLAGS)


def test_a_plain_run_does_not_resume_a_block_diffusion_run(save: Save) -> None:
    folder = str(save(arguments()))
    with pytest.raises(ValueError, match="--diffusion-block-size is not given") as error:
        check_start(arguments(load=folder, diffusion_block_size=None), FLAGS)
    assert "--diffusion-block-size 8" in str(error.value)
    assert "--finetune" in str(error.value)
    check_start(arguments(load=folder, diffusion_block_size=None, finetune=True), FLAGS)


def test_a_checkpoint_without_arguments_is_said_to_be_unchecked(save: Save) -> None:
    start = check_start(arguments(load=str(save(None))), FLAGS)
    assert start.notes == ["the checkpoint has no arguments to compare with this run's"]


def test_a_checkpoint_without_arguments_still_has_its_iteration(save: Save) -> None:
    with pytest.raises(ValueError, match=r"has done 10 of --train-iters 5: nothing is left to train. Use --finetune"):
        check_start(arguments(load=str(save(None)), train_iters=5), FLAGS)


def test_nothing_to_load_is_a_start_from_random_weights() -> None:
    assert check_start(arguments(), FLAGS).checkpoint is None


@pytest.mark.parametrize("flag", ["load", "pretrained_checkpoint"])
def test_checkpoint_arguments_give_the_clean_length_back(save: Save, flag: str) -> None:
    """A checkpoint of an older version has the row count as `seq_length`."""
    args = arguments(seq_length=128, **{flag: str(save(arguments()))})
    use_checkpoint_length(args)
    assert args.seq_length == 64


def test_checkpoint_arguments_of_an_autoregressive_run_keep_their_length(save: Save) -> None:
    args = arguments(load=str(save(Namespace(seq_length=64))), seq_length=64)
    use_checkpoint_length(args)
    assert args.seq_length == 64


def test_files_that_cannot_be_read_are_named(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(arguments())

    def fail(path: Path) -> None:
        raise EOFError("Ran out of input")

    monkeypatch.setattr("megatron_csbp.megatron_checkpoints.common_state", fail)
    with pytest.raises(
        ValueError, match=r"iter_0000010 cannot be read \(EOFError: Ran out of input\)\. Copy it again"
    ):
        check_start(arguments(load=str(folder)), FLAGS)
