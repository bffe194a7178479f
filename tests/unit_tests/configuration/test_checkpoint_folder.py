# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is found as Megatron finds it, and files that cannot be read are refused by name."""

import re
from pathlib import Path

import pytest

from megatron_csbp import megatron_checkpoints
from megatron_csbp.configuration.checkpoint_folder import (
    TRACKER,
    Checkpoint,
    check_format,
    check_sizes,
    checkpoint_to_load,
    read_tracker,
)
from tests.unit_tests.configuration.support import arguments, lay_out


def test_the_tracker_names_the_checkpoint(tmp_path: Path) -> None:
    path = lay_out(tmp_path)
    found = checkpoint_to_load(arguments(load=str(tmp_path)))
    assert found == Checkpoint(f"--load {tmp_path}", path, 10, is_release=False)


@pytest.mark.parametrize(
    "text, read", [("10", (10, False)), ("10\n", (10, False)), ("0", (0, False)), ("release\n", (0, True))]
)
def test_reads_megatrons_tracker_file(tmp_path: Path, text: str, read: tuple[int, bool]) -> None:
    (tmp_path / TRACKER).write_text(text)
    assert read_tracker(tmp_path) == read


@pytest.mark.parametrize("text", ["ten", "", "-1", "1.5", "\udcff"])
def test_an_unreadable_tracker_is_refused_with_what_to_write(tmp_path: Path, text: str) -> None:
    lay_out(tmp_path)
    (tmp_path / TRACKER).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / TRACKER} holds ")) as error:
        checkpoint_to_load(arguments(load=str(tmp_path)))
    assert "the folder has iterations 10: write 10 into it" in str(error.value)


@pytest.mark.parametrize(
    "asked, message",
    [
        (7, r"no checkpoint of iteration 7 \(--ckpt-step asks for it\); it has 10\."),
        (None, rf"no checkpoint of iteration 20 \({TRACKER} names it\); it has 10\."),
    ],
)
def test_an_iteration_has_to_be_there(tmp_path: Path, asked: int | None, message: str) -> None:
    lay_out(tmp_path)
    (tmp_path / TRACKER).write_text("20")
    with pytest.raises(ValueError, match=message):
        checkpoint_to_load(arguments(load=str(tmp_path), ckpt_step=asked))


def test_a_chosen_iteration_needs_no_tracker(tmp_path: Path) -> None:
    lay_out(tmp_path)
    (tmp_path / TRACKER).unlink()
    found = checkpoint_to_load(arguments(load=str(tmp_path), ckpt_step=10))
    assert found is not None
    assert found.iteration == 10
    with pytest.raises(ValueError, match=rf"has iter_\* folders \(10\) but no {TRACKER}.*: write 10 into that file"):
        checkpoint_to_load(arguments(load=str(tmp_path), save=str(tmp_path)))


def test_a_folder_without_a_checkpoint_is_the_first_start_of_a_run_that_saves_there(tmp_path: Path) -> None:
    folder = str(tmp_path / "new")
    assert checkpoint_to_load(arguments(load=folder, save=folder + "/")) is None
    with pytest.raises(ValueError, match=f"--load {folder} has no checkpoint: .* give --save {folder} as well"):
        checkpoint_to_load(arguments(load=folder, save=str(tmp_path / "other")))
    with pytest.raises(ValueError, match="--exit-on-missing-checkpoint is given"):
        checkpoint_to_load(arguments("--exit-on-missing-checkpoint", load=folder, save=folder))


def test_pretrained_weights_count_until_the_run_has_saved(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    path = lay_out(old, 5)
    flags = {"load": str(new), "save": str(new), "pretrained_checkpoint": str(old)}
    assert checkpoint_to_load(arguments(**flags)) == Checkpoint(f"--pretrained-checkpoint {old}", path, 5, False)
    saved = lay_out(new)
    assert checkpoint_to_load(arguments(**flags)) == Checkpoint(f"--load {new}", saved, 10, False)
    with pytest.raises(ValueError, match="--pretrained-checkpoint none has no checkpoint"):
        checkpoint_to_load(arguments(pretrained_checkpoint="none"))


@pytest.mark.parametrize("text", ["", '{"sharded_back', "[]", "{}"])
def test_a_cut_metadata_file_is_refused_with_what_it_holds(tmp_path: Path, text: str) -> None:
    path = lay_out(tmp_path)
    (path / "metadata.json").write_text(text)
    message = rf"metadata.json is empty or cut off \({len(text)} bytes\)\. Write .*torch_dist"
    with pytest.raises(ValueError, match=message):
        check_format(Checkpoint("--load x", path, 10, False))


def test_a_missing_metadata_file_is_refused(tmp_path: Path) -> None:
    path = lay_out(tmp_path)
    (path / "metadata.json").unlink()
    checkpoint = Checkpoint("--load x", path, 10, False)
    with pytest.raises(ValueError, match=r"neither metadata.json nor mp_rank_00"):
        check_format(checkpoint)
    (path / ".metadata").touch()
    with pytest.raises(ValueError, match=r"metadata.json is missing.*Write .*torch_dist"):
        check_format(checkpoint)
    (path / "mp_rank_00").mkdir()
    check_format(checkpoint)


def test_a_truncated_data_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out(tmp_path, 5)
    path = lay_out(tmp_path)
    monkeypatch.setattr(megatron_checkpoints, "least_file_bytes", lambda _: {"__0_0.distcp": 100})
    checkpoint = Checkpoint("--load x", path, 10, False)
    with pytest.raises(ValueError, match=r"__0_0.distcp is missing\. Copy it again, or .* --ckpt-step 5"):
        check_sizes(checkpoint)
    (path / "__0_0.distcp").write_bytes(b"0" * 99)
    with pytest.raises(ValueError, match=r"__0_0.distcp is truncated: it has 99 bytes, and .* index names 100\."):
        check_sizes(checkpoint)
    (path / "__0_0.distcp").write_bytes(b"0" * 100)
    check_sizes(checkpoint)
