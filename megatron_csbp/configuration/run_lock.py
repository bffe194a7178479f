# SPDX-License-Identifier: Apache-2.0
"""One run at a time saves into a folder.

The first rank leaves a file that says who it is, and touches it as long as it lives. A lock of a process that is gone
is taken over: on the same machine at once; from another machine once it has not been touched for a while, and at once
if it is of the same job, which the scheduler has started again.
"""

import atexit
import contextlib
import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LOCK_NAME = ".megatron_csbp.lock"
_TOUCHED_EVERY_S = 60.0
STALE_AFTER_S = 600.0


def check_lock(save: str) -> None:
    """Check that no other run saves into a folder. Every rank does, and only reads.

    Raises:
        ValueError: one does.
    """
    lock = Path(save) / LOCK_NAME
    holder = _holder(lock)
    if holder is None or _is_ours(holder) or _is_gone(holder, lock):
        return
    raise ValueError(
        f"--save {save}: another run saves into this folder: process {holder.get('process')} on {holder.get('host')}"
        f"{', job ' + str(holder['job']) if holder.get('job') else ''}, since {holder.get('since')}. Two runs would "
        f"overwrite each other's checkpoints: give another --save; or, if that run is dead, remove {lock}."
    )


def hold_lock(save: str) -> None:
    """Take the lock of a folder until this process ends. The first rank calls, after `check_lock`.

    Args:
        save: the folder, which exists.
    """
    lock = Path(save) / LOCK_NAME
    mine = _identity() | {"since": time.strftime("%Y-%m-%d %H:%M:%S")}
    new = lock.with_name(f"{LOCK_NAME}.{os.getpid()}")
    new.write_text(json.dumps(mine))
    new.replace(lock)
    ended = threading.Event()

    def touch() -> None:
        while not ended.wait(_TOUCHED_EVERY_S):
            with contextlib.suppress(OSError):
                if _holder(lock) == mine:
                    os.utime(lock)

    def release() -> None:
        ended.set()
        with contextlib.suppress(OSError):
            if _holder(lock) == mine:
                lock.unlink()

    threading.Thread(target=touch, name="run lock", daemon=True).start()
    atexit.register(release)


def _identity() -> dict[str, Any]:
    """Say who this process is. Ranks of one run share `run`, and a job that was started again has other `restarts`."""
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    return {
        "host": os.uname().nodename,
        "process": os.getpid(),
        "started": _start_of(os.getpid()),
        "namespace": _namespace(),
        "job": os.environ.get("SLURM_JOB_ID"),
        "restarts": os.environ.get("SLURM_RESTART_COUNT", "0"),
        "run": " ".join(os.environ.get(name, "") for name in names),
    }


def _holder(lock: Path) -> dict[str, Any] | None:
    """Return who holds a lock; None if nobody does, or the file says nothing."""
    try:
        holder = json.loads(lock.read_text())
    except (OSError, ValueError):
        return None
    return holder if isinstance(holder, dict) else None


def _is_ours(holder: Mapping[str, Any]) -> bool:
    """Return whether the holder is a rank of this run: one rendezvous address belongs to one run at a time."""
    mine = _identity()
    is_reachable = os.environ.get("MASTER_ADDR") not in (None, "localhost", "127.0.0.1", "::1")
    return holder.get("run") == mine["run"] and (is_reachable or holder.get("host") == mine["host"])


def _is_gone(holder: Mapping[str, Any], lock: Path) -> bool:
    if holder.get("host") == os.uname().nodename and holder.get("namespace") == _namespace():
        started = _start_of(int(holder.get("process", -1)))
        return started is None or started != holder.get("started")
    mine = _identity()
    if mine["job"] and holder.get("job") == mine["job"] and holder.get("restarts") != mine["restarts"]:
        return True
    with contextlib.suppress(OSError):
        return _now_there(lock.parent) - lock.stat().st_mtime > STALE_AFTER_S
    return True


def _now_there(folder: Path) -> float:
    """Return the time by the clock of the file system, which may differ from this machine's."""
    probe = folder / f"{LOCK_NAME}.{os.uname().nodename}.{os.getpid()}"
    probe.touch()
    now = probe.stat().st_mtime
    probe.unlink()
    return now


def _start_of(process: int) -> str | None:
    """Return when a process of this machine was started, in clock ticks since boot; None if there is none."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def _namespace() -> str | None:
    """Return the process namespace: a container's process numbers mean nothing outside it."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
