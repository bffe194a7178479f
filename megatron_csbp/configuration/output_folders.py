# SPDX-License-Identifier: Apache-2.0
"""Folders that a run writes into are tried before the work, not after it. Imports nothing of Megatron."""

import os
import tempfile
from argparse import Namespace
from pathlib import Path

_FOLDERS = (
    "save",
    "tensorboard_dir",
    "data_cache_path",
    "wandb_save_dir",
    "non_persistent_global_ckpt_dir",
    "non_persistent_local_ckpt_dir",
)
_TRIED_BYTES = 1 << 16


def check_output_folders(args: Namespace, makes_them: bool = True) -> None:
    """Write a small file into every folder that a run will write into, and remove it. Every rank does.

    Args:
        args: parsed arguments.
        makes_them: make folders that are missing, as Megatron would later; else try the nearest that is there.

    Raises:
        ValueError: a folder cannot be made or written into, or its disk is full.
    """
    for name in _FOLDERS:
        value = getattr(args, name, None)
        if value is not None and "://" not in value:
            _try(f"--{name.replace('_', '-')}", Path(value), makes_them)
    if args.csbp_ledger is not None:
        _try("--csbp-ledger", Path(args.csbp_ledger).parent, makes_them)


def _try(flag: str, folder: Path, makes_it: bool) -> None:
    try:
        if makes_it:
            folder.mkdir(parents=True, exist_ok=True)
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        with tempfile.NamedTemporaryFile(dir=there, prefix=".megatron_csbp-") as file:
            file.write(bytes(_TRIED_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ValueError(
            f"{flag} {folder} cannot be written into on {os.uname().nodename} ({error.strerror or error}); give a "
            "folder with room that every rank may write into."
        ) from error
