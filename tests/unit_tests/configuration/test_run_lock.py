# SPDX-License-Identifier: Apache-2.0
"""Two runs do not save into one folder; a run that is gone does not keep others out."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_csbp.configuration.run_lock import LOCK_NAME, STALE_AFTER_S, check_lock, hold_lock

HOLD = "import sys; from megatron_csbp.configuration.run_lock import hold_lock; hold_lock(sys.argv[1])"


@pytest.fixture(autouse=True)
def outside_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")


def hold(folder: Path, *, stays: bool, port: str = "2") -> subprocess.Popen[str]:
    """Take the lock in a process of its own."""
    code = f"{HOLD}; print('held', flush=True); {'sys.stdin.read()' if stays else 'None'}"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        env=os.environ | {"MASTER_PORT": port},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def edit(folder: Path, **changes: Any) -> None:
    lock = folder / LOCK_NAME
    lock.write_text(json.dumps(json.loads(lock.read_text()) | changes))


def test_a_folder_without_a_lock_is_free(tmp_path: Path) -> None:
    check_lock(str(tmp_path))


def test_a_living_run_keeps_others_out_until_it_ends(tmp_path: Path) -> None:
    other = hold(tmp_path, stays=True)
    with pytest.raises(ValueError, match=f"another run saves into this folder: process {other.pid} on ") as error:
        check_lock(str(tmp_path))
    assert f"give another --save; or, if that run is dead, remove {tmp_path / LOCK_NAME}" in str(error.value)
    other.communicate()
    assert list(tmp_path.iterdir()) == []
    check_lock(str(tmp_path))


def test_other_ranks_of_the_run_are_let_in(tmp_path: Path) -> None:
    other = hold(tmp_path, stays=True, port="1")
    check_lock(str(tmp_path))
    other.communicate()


def test_a_killed_run_keeps_nobody_out(tmp_path: Path) -> None:
    other = hold(tmp_path, stays=True)
    other.kill()
    other.wait()
    assert (tmp_path / LOCK_NAME).exists()
    check_lock(str(tmp_path))


def test_another_process_under_the_same_number_is_not_the_run(tmp_path: Path) -> None:
    other = hold(tmp_path, stays=True)
    edit(tmp_path, started="1")
    check_lock(str(tmp_path))
    other.communicate()


def test_a_run_on_another_machine_is_alive_while_it_touches_its_lock(tmp_path: Path) -> None:
    hold(tmp_path, stays=True).kill()
    edit(tmp_path, host="elsewhere", job="7")
    with pytest.raises(ValueError, match=r"on elsewhere, job 7, since \d"):
        check_lock(str(tmp_path))
    lock = tmp_path / LOCK_NAME
    long_ago = lock.stat().st_mtime - STALE_AFTER_S - 10
    os.utime(lock, (long_ago, long_ago))
    check_lock(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_NAME]


def test_a_job_that_was_started_again_takes_its_lock_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(tmp_path, stays=True).kill()
    edit(tmp_path, host="elsewhere", job="7", restarts="0")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(ValueError, match="another run saves"):
        check_lock(str(tmp_path))  # a second step of the same job
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    check_lock(str(tmp_path))


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_lock_that_says_nothing_keeps_nobody_out(tmp_path: Path, text: str) -> None:
    (tmp_path / LOCK_NAME).write_text(text)
    check_lock(str(tmp_path))


def test_a_lock_that_was_taken_over_is_not_removed_by_its_first_holder(tmp_path: Path) -> None:
    first = hold(tmp_path, stays=True)
    hold_lock(str(tmp_path))
    first.communicate()
    assert json.loads((tmp_path / LOCK_NAME).read_text())["process"] == os.getpid()
