# SPDX-License-Identifier: Apache-2.0
"""GPUs and how they are linked, shared memory, limits of the system, and the variable that CUDA reads."""

import os
import re
import resource
import shutil
import subprocess
from pathlib import Path

from megatron_csbp.configuration.hardware_queues import VARIABLE
from megatron_csbp.doctor.findings import Finding, fail, ok, warn

_GIB = 2**30
_USED_SHARE = 0.05
_LEAST_SHARED_GIB, _ENOUGH_SHARED_GIB = 0.25, 1.0
_LEAST_FILES, _ENOUGH_FILES = 1024, 8192
_BLACKWELL = 10
_SHARED_FIX = (
    "give the container more: docker run --ipc=host, or --shm-size=16g; or mount -o remount,size=50% /dev/shm"
)
_SLOW_LINKS = ("SYS", "NODE", "PHB")
"""Links of `nvidia-smi topo -m` that cross a host bridge or the sockets' interconnect."""


def check_hardware() -> list[Finding]:
    """Look at the devices of this machine and at what the system allows this process."""
    import torch

    capabilities = []
    findings: list[Finding] = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
            capabilities.append(properties.major)
            findings.append(gpu_memory(index, properties.name, free, total))
        findings.append(links(_topology(), torch.cuda.device_count()))
    else:
        findings.append(ok("GPUs", "none here: what follows is of a machine without GPUs"))
    findings.append(one_queue(os.environ.get(VARIABLE), min(capabilities, default=None)))
    findings.append(shared_memory(Path("/dev/shm")))
    findings += limits(has_infiniband=Path("/sys/class/infiniband").is_dir())
    findings.append(processors())
    return findings


def gpu_memory(index: int, name: str, free: int, total: int) -> Finding:
    """Judge the free memory of a GPU, in bytes."""
    detail = f"{name}, {free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
    if free < (1 - _USED_SHARE) * total:
        fix = "end what uses it (nvidia-smi lists the processes), or ask for the node alone (sbatch --exclusive)"
        return warn(f"GPU {index}", detail, fix)
    return ok(f"GPU {index}", detail)


def _topology() -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    run = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False)
    return run.stdout if run.returncode == 0 else ""


def links(topology: str, number: int) -> Finding:
    """Judge how the GPUs of a machine are linked.

    Args:
        topology: what `nvidia-smi topo -m` prints; empty if it cannot be had.
        number: GPUs of this process.
    """
    name = "links of the GPUs"
    if number < 2:
        return ok(name, "one GPU")
    text = re.sub(r"\x1b\[[0-9;]*m", "", topology)
    rows = [line.split() for line in text.splitlines() if re.match(r"\s*GPU\d+\s", line) and " X " in f" {line} "]
    kinds: dict[str, int] = {}
    for place, row in enumerate(rows):
        for kind in row[1 : 1 + len(rows)][place + 1 :]:
            kinds[kind] = kinds.get(kind, 0) + 1
    if not kinds:
        return warn(name, "nvidia-smi topo -m says nothing", "look whether nvidia-smi works in this container")
    detail = ", ".join(f"{count} pair(s) by {kind}" for kind, count in kinds.items())
    if any(kind in _SLOW_LINKS for kind in kinds):
        fix = "keep a context group inside GPUs with NVLink (NV...), or expect the exchange to show (docs/gpu.md)"
        return warn(name, detail, fix)
    return ok(name, detail)


def one_queue(value: str | None, capability: int | None) -> Finding:
    """Judge the variable that sets the number of hardware queues.

    Args:
        value: of the variable; None if it is not set.
        capability: least major compute capability of the GPUs; None without any.
    """
    if value is None:
        return ok(VARIABLE, "not set: the entries set it to 1 where Megatron wants that")
    if value != "1" and (capability is None or capability < _BLACKWELL):
        detail = f"{value}; before Blackwell Megatron wants 1 with tensor or context parallelism"
        return fail(VARIABLE, detail, f"export {VARIABLE}=1, or unset it")
    return ok(VARIABLE, value)


def shared_memory(folder: Path) -> Finding:
    """Judge the room in the shared memory, through which data workers hand over samples and NCCL data."""
    name = str(folder)
    try:
        stats = os.statvfs(folder)
    except OSError as error:
        return fail(name, f"is not there: {error.strerror}", "mount a tmpfs there")
    free = stats.f_bavail * stats.f_frsize / _GIB
    detail = f"{free:.2f} GiB free"
    if free < _LEAST_SHARED_GIB:
        return fail(name, f"{detail}: data workers and NCCL end with a bus error when it is full", _SHARED_FIX)
    return ok(name, detail) if free >= _ENOUGH_SHARED_GIB else warn(name, detail, _SHARED_FIX)


def limits(has_infiniband: bool) -> list[Finding]:
    """Judge what `ulimit` allows.

    Args:
        has_infiniband: whether there are InfiniBand devices, whose memory has to be locked.
    """
    files, locked = resource.getrlimit(resource.RLIMIT_NOFILE)[0], resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    name, fix = "open files (ulimit -n)", "ulimit -n 65536 where the ranks are started, or raise it in limits.conf"
    if _is_below(files, _LEAST_FILES):
        findings = [fail(name, f"{files}: sockets, data files and checkpoint writers need more", fix)]
    elif _is_below(files, _ENOUGH_FILES):
        findings = [warn(name, f"{files}; jobs of many ranks need more", fix)]
    else:
        findings = [ok(name, _said(files))]
    name = "locked memory (ulimit -l)"
    if has_infiniband and locked != resource.RLIM_INFINITY:
        fix = "ulimit -l unlimited; in docker --ulimit memlock=-1; in SLURM PropagateResourceLimitsExcept=MEMLOCK"
        findings.append(warn(name, f"{locked} bytes: NCCL cannot register memory with InfiniBand", fix))
    else:
        findings.append(ok(name, _said(locked) if has_infiniband else f"{_said(locked)}; no InfiniBand here"))
    return findings


def processors() -> Finding:
    """Judge how many processors this process may use."""
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS")
    detail = f"{usable} of {there} usable, OMP_NUM_THREADS {threads or 'not set'}"
    if usable == 1 < there:
        fix = "srun --cpus-per-task (it does not take it over from sbatch), or --cpu-bind=none"
        return warn("processors", f"{detail}: data workers and checkpoint writers share one", fix)
    return ok("processors", detail)


def _is_below(limit: int, least: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < least


def _said(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
