# SPDX-License-Identifier: Apache-2.0
"""Rows start anew in the first conversion only, and what was trained stays."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron_csbp.configuration.checkpoint_folder import TRACKER, Checkpoint
from megatron_csbp.configuration.checkpoint_rules import Start
from megatron_csbp.configuration.new_row_rules import NewRows, choose_new_rows, new_rows_of_next_load

AUTOREGRESSIVE = Namespace(padded_vocab_size=192)
DIFFUSION = Namespace(padded_vocab_size=192, diffusion_block_size=8, mask_token_id=190)


def checkpoint(folder: Path) -> Checkpoint:
    path = folder / "iter_0000003"
    path.mkdir(exist_ok=True)
    (folder / TRACKER).write_text("3")
    return Checkpoint(f"--load {folder}", path, 3, is_release=False)


def arguments(folder: Path, **changes: Any) -> Namespace:
    values = {"mask_token_id": 190, "init_mask_token": None, "padded_vocab_size": 192, "init_method_std": 0.02}
    values |= {"seed": 7, "load": str(folder), "pretrained_checkpoint": None, "ckpt_step": None, "save": str(folder)}
    return Namespace(**(values | {"exit_on_missing_checkpoint": False} | changes))


def choose(
    folder: Path, saved: Namespace | None, *, is_text: bool = False, resumed: bool = False, **changes: Any
) -> Any:
    args = arguments(folder, **changes)
    note = choose_new_rows(args, Start(checkpoint(folder), resumed, [], saved), 188, is_text)
    return new_rows_of_next_load(args), note


def test_a_conversion_starts_the_row_as_the_mean(tmp_path: Path) -> None:
    new, note = choose(tmp_path, AUTOREGRESSIVE)
    assert new == NewRows(190, 192, 188, 0.0, 7, str(tmp_path / "iter_0000003"))
    assert note == "the row of mask token 190 starts as the mean of the 188 trained rows"


def test_a_mask_token_of_the_tokenizer_is_not_among_the_trained_rows_and_added_rows_start_too(tmp_path: Path) -> None:
    new, note = choose(tmp_path, AUTOREGRESSIVE, mask_token_id=1, padded_vocab_size=256, init_mask_token="mean-noise")
    assert (new.first_added, new.num_trained, new.noise_std) == (192, 188, 0.02)
    assert "mask token 1 and rows 192 to 255 start as the mean of the 187 trained rows, with noise of" in note


@pytest.mark.parametrize(
    "saved, options, said",
    [
        (DIFFUSION, {}, "the checkpoint was trained with it"),
        (DIFFUSION, {"init_mask_token": "mean"}, "the checkpoint was trained with it"),
        (Namespace(knows_mask_token=True, mask_token_id=190), {}, "the checkpoint was trained with it"),
        (AUTOREGRESSIVE, {"init_mask_token": "keep"}, "--init-mask-token keep"),
        (AUTOREGRESSIVE, {"is_text": True}, "it stands for ordinary text; --init-mask-token mean starts it"),
        (None, {}, "does not say how it was trained; --init-mask-token mean"),
    ],
)
def test_rows_that_stay_are_said(saved: Namespace | None, options: dict[str, Any], said: str, tmp_path: Path) -> None:
    new, note = choose(tmp_path, saved, **options)
    assert new is None
    assert said in note


def test_what_is_asked_for_wins_over_what_is_not_known(tmp_path: Path) -> None:
    assert choose(tmp_path, AUTOREGRESSIVE, is_text=True, init_mask_token="mean")[0] is not None
    assert choose(tmp_path, None, init_mask_token="mean")[0] is not None
    assert choose(tmp_path, DIFFUSION, mask_token_id=189)[0] is not None  # another mask token than it was trained with


def test_a_resumed_run_and_random_weights_change_no_row(tmp_path: Path) -> None:
    assert choose(tmp_path, AUTOREGRESSIVE, resumed=True, init_mask_token="mean") == (None, None)
    args = arguments(tmp_path)
    assert choose_new_rows(args, Start(), 188, is_text=False) is None
    assert new_rows_of_next_load(args) is None


def test_a_run_that_restarts_itself_keeps_what_it_has_trained(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    choose_new_rows(args, Start(checkpoint(tmp_path), False, [], AUTOREGRESSIVE), 188, is_text=False)
    assert new_rows_of_next_load(args) is not None
    (tmp_path / "iter_0000005").mkdir()
    (tmp_path / TRACKER).write_text("5")
    assert new_rows_of_next_load(args) is None
