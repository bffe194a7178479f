# SPDX-License-Identifier: Apache-2.0
"""Limits, devices, folders and ports of one machine: what is wrong is named with its remedy."""

import errno
import fcntl
import os
import resource
import socket
from pathlib import Path

import pytest

from megatron_csbp.doctor import folders, hardware, network
from megatron_csbp.doctor.findings import State

GIB = 2**30


def test_a_folder_that_can_be_used_is_left_as_it_was(tmp_path: Path) -> None:
    finding = folders.check_folder(tmp_path / "made" / "later")
    assert finding.state in (State.OK, State.WARN)
    assert "written, renamed, locked" in finding.detail
    assert list(tmp_path.iterdir()) == []


def test_a_read_only_file_system_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(folders.tempfile, "NamedTemporaryFile", refuse)
    finding = folders.check_folder(tmp_path)
    assert finding.lines[0] == f"[fail] folder {tmp_path}: cannot be written into (Read-only file system)"
    assert "mount it read-write" in finding.fix


@pytest.mark.skipif(not os.path.isdir("/proc/sys"), reason="needs a folder that not even root may write into")
def test_a_folder_that_nobody_may_write_into_is_named() -> None:
    finding = folders.check_folder(Path("/proc/sys"))
    assert finding.state is State.FAIL
    assert "cannot be written into" in finding.detail


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(folders.os, "fsync", full)
    finding = folders.check_folder(tmp_path)
    assert "No space left on device" in finding.detail
    assert "make room or raise the quota" in finding.fix
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    refuse.__name__ = "flock"
    monkeypatch.setattr(fcntl, "flock", refuse)
    finding = folders.check_folder(tmp_path)
    assert finding.state is State.WARN
    assert "files cannot be locked (flock: No locks available)" in finding.detail
    assert "Lustre: -o flock" in finding.fix


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert folders.check_folder(tmp_path / "file" / "run").fix == "name a folder"


def test_a_taken_port_is_named_with_one_that_is_free() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        finding = network.port(str(other.getsockname()[1]))
    assert finding.state is State.FAIL
    assert finding.detail == "is taken (Address already in use)"
    free = finding.fix.partition("MASTER_PORT=")[2].partition(",")[0]
    assert network.port(free).state is State.OK


@pytest.mark.parametrize("number", ["0", "70000", "http"])
def test_what_is_no_port_is_refused(number: str) -> None:
    assert network.port(number).detail == "MASTER_PORT is no port"


def test_an_interface_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^docker,ib9")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    gloo, nccl = network.interfaces()
    assert (gloo.state, nccl.state) == (State.OK, State.FAIL)
    assert "this machine has lo" in nccl.detail


def test_a_name_that_is_only_local_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a: [(0, 0, 0, "", ("127.0.1.1", 0))])
    assert network.host_name().state is State.WARN
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert network.host_name().state is State.OK


def test_little_shared_memory_is_named_with_the_option_of_docker(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small:
        f_bavail, f_frsize = 64 * 2**20, 1

    monkeypatch.setattr(os, "statvfs", lambda path: Small)
    finding = hardware.shared_memory(Path("/dev/shm"))
    assert finding.lines == [
        "[fail] /dev/shm: 0.06 GiB free: data workers and NCCL end with a bus error when it is full",
        f"  fix: {finding.fix}",
    ]
    assert "--ipc=host" in finding.fix


def test_low_limits_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    low = {resource.RLIMIT_NOFILE: (256, 256), resource.RLIMIT_MEMLOCK: (65536, 65536)}
    monkeypatch.setattr(resource, "getrlimit", low.__getitem__)
    files, locked = hardware.limits(has_infiniband=True)
    assert (files.state, locked.state) == (State.FAIL, State.WARN)
    assert "ulimit -n 65536" in files.fix
    assert "memlock=-1" in locked.fix
    assert hardware.limits(has_infiniband=False)[1].state is State.OK


@pytest.mark.parametrize(
    "value, capability, state",
    [(None, 9, State.OK), ("1", 9, State.OK), ("8", 9, State.FAIL), ("32", 10, State.OK), ("8", None, State.FAIL)],
)
def test_the_number_of_hardware_queues_is_megatrons_rule(
    value: str | None, capability: int | None, state: State
) -> None:
    assert hardware.one_queue(value, capability).state is state


def test_a_gpu_that_somebody_else_uses_is_named() -> None:
    assert hardware.gpu_memory(0, "NVIDIA H200", 139 * GIB, 140 * GIB).state is State.OK
    finding = hardware.gpu_memory(3, "NVIDIA H200", 60 * GIB, 140 * GIB)
    assert finding.lines[0] == "[warn] GPU 3: NVIDIA H200, 60.0 of 140.0 GiB free"


TOPOLOGY = """
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\t{}\tPIX\t0-47\t0
GPU1\tNV18\t X \tNV18\tSYS\t0-47\t0
GPU2\t{}\tNV18\t X \tSYS\t48-95\t1
NIC0\tPIX\tSYS\tSYS\t X
"""


def test_links_are_counted_by_kind() -> None:
    fast = hardware.links(TOPOLOGY.format("NV18", "NV18"), 3)
    assert (fast.state, fast.detail) == (State.OK, "3 pair(s) by NV18")
    mixed = hardware.links(TOPOLOGY.format("SYS", "SYS"), 3)
    assert (mixed.state, mixed.detail) == (State.WARN, "2 pair(s) by NV18, 1 pair(s) by SYS")
    assert hardware.links("", 8).state is State.WARN
    assert hardware.links("", 1).state is State.OK
