# SPDX-License-Identifier: Apache-2.0
"""A resumed run keeps what its noise and its loss are made of."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron_csbp import megatron_compat
from megatron_csbp.configuration.checkpoint_rules import check_resume, latest_iteration, use_checkpoint_length

SAVED = {
    "diffusion_block_size": 8,
    "mask_token_id": 190,
    "diffusion_objective": "nemotron",
    "clean_attention": "token-causal",
    "noise_schedule": "log-linear",
    "noise_eps": 1e-3,
    "diffusion_loss_weight": 0.3,
    "ar_loss_weight": 1.0,
    "clean_seq_length": 64,
    "eod_mask_loss": False,
    "seed": 7,
    "rotary_base": 10_000,
    "rotary_percent": 1.0,
}
OTHER = {
    "diffusion_block_size": 16,
    "mask_token_id": 189,
    "diffusion_objective": "block-diffusion",
    "clean_attention": "block-causal",
    "noise_schedule": "cosine",
    "noise_eps": 1e-2,
    "diffusion_loss_weight": 1.0,
    "ar_loss_weight": 0.0,
    "clean_seq_length": 128,
    "eod_mask_loss": True,
    "seed": 8,
    "rotary_base": 500_000,
    "rotary_percent": 0.5,
}
MODEL = {
    "num_layers": 2,
    "hidden_size": 64,
    "swiglu": True,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "group_query_attention": True,
    "kv_channels": 16,
    "padded_vocab_size": 192,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "qk_layernorm": False,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": False,
    "num_experts": None,
}
OPTIMIZER = {"bf16": False, "fp16": False, "use_distributed_optimizer": False, "lr": 1e-3, "min_lr": 0.0}
RUN = SAVED | MODEL | OPTIMIZER | {"no_save_optim": None}


def write_checkpoint(folder: Path) -> None:
    """Make what a folder with a checkpoint of iteration 10 has, without its contents."""
    (folder / "latest_checkpointed_iteration.txt").write_text("10")
    (folder / "iter_0000010").mkdir()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of iteration 10 with the arguments SAVED."""
    write_checkpoint(tmp_path)

    def load(asked: Path, iteration: int) -> Namespace | None:
        assert (asked, iteration) == (tmp_path, 10)
        return Namespace(**RUN)

    monkeypatch.setattr(megatron_compat, "load_checkpoint_arguments", load)
    return tmp_path


def resume(folder: Path, **changes: Any) -> None:
    given = {"load": str(folder), "finetune": False, "ckpt_step": None, "no_load_optim": None}
    check_resume(Namespace(**RUN | given | changes))


def test_the_same_run_resumes(folder: Path) -> None:
    resume(folder)


@pytest.mark.parametrize("name", SAVED)
def test_another_value_is_refused(folder: Path, name: str) -> None:
    flag = {"clean_seq_length": "--seq-length"}.get(name, "--" + name.replace("_", "-"))
    with pytest.raises(ValueError, match="a run keeps its noise and its loss") as error:
        resume(folder, **{name: OTHER[name]})
    if name == "eod_mask_loss":
        assert str(error.value).startswith(f"{flag} is given and was not in the checkpoint that --load {folder}")
        assert f"Leave out {flag}, or --finetune" in str(error.value)
        return
    assert str(error.value).startswith(
        f"{flag} {OTHER[name]} differs from {SAVED[name]} in the checkpoint that --load {folder}"
    )
    assert f"Use {flag} {SAVED[name]}, or --finetune" in str(error.value)


@pytest.mark.parametrize(
    "name, value, flag",
    [
        ("hidden_size", 128, "--hidden-size 128 differs from 64"),
        ("swiglu", False, "--swiglu is not given and was"),
        ("add_bias_linear", True, "--disable-bias-linear is not given and was"),
        ("num_experts", 4, "--num-experts 4 is given and was not"),
        ("normalization", "LayerNorm", "--normalization LayerNorm differs from RMSNorm"),
    ],
)
@pytest.mark.parametrize("finetune", [False, True])
def test_another_model_is_refused_also_for_a_new_run(
    folder: Path, name: str, value: object, flag: str, finetune: bool
) -> None:
    with pytest.raises(ValueError, match=f"^{flag} in the checkpoint .*its weights do not fit"):
        resume(folder, finetune=finetune, **{name: value})


def test_heads_without_groups_are_compared_as_megatron_fills_them_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron writes the number of heads over `num_query_groups` in the course of a run, and saves that."""
    write_checkpoint(tmp_path)
    multi_head = RUN | {"group_query_attention": False}
    monkeypatch.setattr(
        megatron_compat, "load_checkpoint_arguments", lambda *_: Namespace(**multi_head | {"num_query_groups": 4})
    )
    resume(tmp_path, group_query_attention=False, num_query_groups=1)
    with pytest.raises(ValueError, match="--num-query-groups 2 differs from 4"):
        resume(tmp_path, num_query_groups=2)


@pytest.mark.parametrize(
    "name, value", [("bf16", True), ("use_distributed_optimizer", True), ("lr", 2e-3), ("min_lr", 1e-4)]
)
def test_an_optimizer_whose_state_would_not_be_found_is_refused(folder: Path, name: str, value: object) -> None:
    with pytest.raises(
        ValueError, match=r"its optimizer state does not fit. (Use|Add|Leave out) --.*, or --no-load-optim"
    ):
        resume(folder, **{name: value})
    resume(folder, no_load_optim=True, **{name: value})
    resume(folder, finetune=True, **{name: value})


@pytest.mark.parametrize(
    "asked, message",
    [
        (7, r"no checkpoint of iteration 7 \(--ckpt-step asks for it\); it has 10\."),
        (None, r"no checkpoint of iteration 20 \(latest_checkpointed_iteration.txt names it\); it has 10\."),
    ],
)
def test_an_iteration_has_to_be_there(tmp_path: Path, asked: int | None, message: str) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    with pytest.raises(ValueError, match=message):
        resume(tmp_path, ckpt_step=asked)


def test_a_new_run_from_old_weights_may_differ(folder: Path) -> None:
    resume(folder, finetune=True, diffusion_block_size=16)


def test_a_chosen_iteration_is_compared(folder: Path) -> None:
    (folder / "latest_checkpointed_iteration.txt").write_text("20")
    resume(folder, ckpt_step=10)
    with pytest.raises(ValueError, match="--seed 8 differs from 7"):
        resume(folder, ckpt_step=10, seed=8)


def test_weights_of_an_autoregressive_run_may_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path)
    monkeypatch.setattr(megatron_compat, "load_checkpoint_arguments", lambda *_: Namespace(seed=1, seq_length=64))
    resume(tmp_path)


def test_checkpoint_arguments_give_the_clean_length_back(folder: Path) -> None:
    """Megatron saves and restores `seq_length`, which is the row count by then."""
    args = Namespace(load=str(folder), ckpt_step=None, seq_length=128)
    use_checkpoint_length(args)
    assert args.seq_length == 64


def test_checkpoint_arguments_of_an_autoregressive_run_keep_their_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path)
    monkeypatch.setattr(megatron_compat, "load_checkpoint_arguments", lambda *_: Namespace(seq_length=64))
    args = Namespace(load=str(tmp_path), pretrained_checkpoint=None, ckpt_step=None, seq_length=64)
    use_checkpoint_length(args)
    assert args.seq_length == 64


def test_checkpoint_arguments_from_pretrained_weights_have_their_length_too(folder: Path) -> None:
    args = Namespace(load=None, pretrained_checkpoint=str(folder), ckpt_step=None, seq_length=128)
    use_checkpoint_length(args)
    assert args.seq_length == 64


def test_nothing_to_resume_is_no_error(tmp_path: Path) -> None:
    resume(tmp_path)
    check_resume(Namespace(**RUN, load=None, finetune=False, ckpt_step=None))


@pytest.mark.parametrize("text, iteration", [("10", 10), ("10\n", 10), ("release", None), ("", None)])
def test_reads_megatrons_tracker_file(tmp_path: Path, text: str, iteration: int | None) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    assert latest_iteration(tmp_path) == iteration


def test_a_plain_run_does_not_resume_a_block_diffusion_run(folder: Path) -> None:
    with pytest.raises(ValueError, match="--diffusion-block-size is not given") as error:
        resume(folder, diffusion_block_size=None)
    assert "--diffusion-block-size 8" in str(error.value)
    assert "--finetune" in str(error.value)
    resume(folder, diffusion_block_size=None, finetune=True)


@pytest.mark.parametrize("finetune", [False, True])
def test_weights_of_another_model_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, finetune: bool) -> None:
    monkeypatch.setattr(
        megatron_compat, "load_checkpoint_arguments", lambda *_: Namespace(**SAVED, hidden_size=64, num_layers=2)
    )
    resume(folder, hidden_size=64, num_layers=2, finetune=finetune)
    with pytest.raises(ValueError, match="--hidden-size 32 differs from 64") as error:
        resume(folder, hidden_size=32, num_layers=2, finetune=finetune)
    assert "Use --hidden-size 64." in str(error.value)
