# SPDX-License-Identifier: Apache-2.0
"""A folder that cannot be written into is refused before the work, by the flag that names it."""

import errno
import os
from argparse import Namespace
from pathlib import Path

import pytest

from megatron_csbp.configuration.output_folders import check_output_folders

NAMES = ["save", "tensorboard_dir", "data_cache_path", "wandb_save_dir", "non_persistent_global_ckpt_dir"]


def arguments(**given: str | None) -> Namespace:
    return Namespace(**dict.fromkeys(NAMES) | {"csbp_ledger": None} | given)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_that_is_missing_is_made_and_left_empty(name: str, tmp_path: Path) -> None:
    check_output_folders(arguments(**{name: str(tmp_path / "new" / "folder")}))
    assert list((tmp_path / "new" / "folder").iterdir()) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_that_cannot_be_made_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "folder"
    message = rf"--{name.replace('_', '-')} {folder} cannot be written into on \S+ \(Not a directory\)"
    for makes_them in (True, False):
        with pytest.raises(ValueError, match=message):
            check_output_folders(arguments(**{name: str(folder)}), makes_them)


def test_a_check_alone_makes_no_folder(tmp_path: Path) -> None:
    check_output_folders(arguments(save=str(tmp_path / "new" / "folder")), makes_them=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_full_or_read_only_disk_is_refused(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ValueError, match=rf"--save {tmp_path} cannot be written into .* \({os.strerror(code)}\)"):
        check_output_folders(arguments(save=str(tmp_path)))
    with pytest.raises(ValueError, match=f"--csbp-ledger {tmp_path} cannot be written into"):
        check_output_folders(arguments(csbp_ledger=str(tmp_path / "bytes.jsonl")))
    assert list(tmp_path.iterdir()) == []


def test_folders_in_object_storage_are_left_alone() -> None:
    check_output_folders(arguments(save="msc://bucket/run"))
