# SPDX-License-Identifier: Apache-2.0
"""Folders that a run writes into: write, rename, lock, room."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from megatron_csbp.doctor.findings import Finding, fail, ok, warn

_GIB = 2**30
_LEAST_GIB, _ENOUGH_GIB = 0.1, 10.0
_TRIED_BYTES = 1 << 20


def check_folder(folder: Path) -> Finding:
    """Do in a folder what a run does when it saves: write and sync a file, lock it, rename it over another.

    Args:
        folder: if it is missing, the nearest one above it that is there; a run would make it.
    """
    name = f"folder {folder}"
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        return fail(name, f"{there} is a file", "name a folder")
    step = "written into"
    made: list[Path] = []
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".megatron_csbp-doctor-", delete=False) as file:
            first = Path(file.name)
            made.append(first)
            file.write(bytes(_TRIED_BYTES))
            file.flush()
            os.fsync(file.fileno())
        step = "used to rename a file"
        second = first.with_suffix(".renamed")
        made.append(second)
        second.touch()
        first.replace(second)
        step = ""
        locked = _lock_error(second)
    except OSError as error:
        return fail(name, f"cannot be {step} ({error.strerror or error})", _fix(error))
    finally:
        for path in made:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
    free = shutil.disk_usage(there).free / _GIB
    detail = f"written, renamed, locked; {free:.1f} GiB free{'' if there == folder.absolute() else f' (in {there})'}"
    if locked is not None:
        fix = "mount it with locks (NFS: without nolock; Lustre: -o flock), or put caches on another file system"
        return warn(name, f"files cannot be locked ({locked}): caches of tokenizers and kernels wait for locks", fix)
    if free < _LEAST_GIB:
        return fail(name, detail, "make room: a checkpoint that does not fit is cut off")
    return ok(name, detail) if free >= _ENOUGH_GIB else warn(name, detail, "make room, or keep fewer checkpoints")


def _lock_error(path: Path) -> str | None:
    """Return why a file cannot be locked, by either call that programs use; None if it can."""
    with path.open("r+b") as file:
        for lock in (fcntl.flock, fcntl.lockf):
            try:
                lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                return f"{lock.__name__}: {error.strerror or error}"
    return None


def _fix(error: OSError) -> str:
    if error.errno in (28, 122):  # ENOSPC, EDQUOT
        return "make room or raise the quota (df -h, df -i, quota -s), or name another folder"
    if error.errno == 30:  # EROFS
        return "mount it read-write on every node (pyxis: --container-mounts without :ro), or name another folder"
    return "name a folder that this user may write into on every node (ls -ld shows the owner)"
