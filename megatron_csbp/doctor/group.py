# SPDX-License-Identifier: Apache-2.0
"""What only several ranks can find out: that they meet, agree, see the same files, and have one time.

Every function here is called by all ranks, and returns findings on rank 0 only.
"""

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_csbp.agreement.differences import differences
from megatron_csbp.doctor.findings import Finding, fail, ok, warn
from megatron_csbp.doctor.launcher import Place
from megatron_csbp.versions import installed_versions, source_digest

MEETS_S = 600.0
_SEES_S = 15.0
_MOST_SKEW_S = 1.0
_PINGS = 5


def meet(place: Place) -> Finding | None:
    """Make the process group of all ranks; return why it cannot be made."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=MEETS_S))
        dist.barrier()
    except (RuntimeError, ValueError, OSError) as error:
        detail = f"{place.world_size} ranks do not meet at {address}:{port} ({str(error).splitlines()[0]})"
        fix = (
            "look at the logs of ranks that did not come; check that the name resolves on every node, that no "
            "firewall is between them, that the port is free, and GLOO_SOCKET_IFNAME"
        )
        return fail("ranks meet", detail, fix)
    return None


def gathered(value: Any) -> list[Any]:
    """Return a value of every rank, in their order; on rank 0 only, elsewhere nothing."""
    values: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values)
    return values or []


def shared(value: Any) -> Any:
    """Return rank 0's value on every rank."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def check_versions(hosts: Sequence[str]) -> list[Finding]:
    """Compare what is installed where."""
    facts = {f"the version of {name}": version for name, version in installed_versions().items()}
    of_ranks = gathered(facts | {"the source of megatron_csbp": source_digest()})
    if not of_ranks:
        return []
    lines = differences(of_ranks, hosts)
    if not lines:
        return [ok("versions agree", f"{len(of_ranks)} ranks on {len(set(hosts))} machine(s) have the same")]
    fix = "give every node the same container image or environment"
    return [fail("versions agree", line, fix) for line in lines]


def check_clocks(hosts: Sequence[str], place: Place) -> list[Finding]:
    """Compare the clock of each machine with rank 0's, by the round trip of a message."""
    firsts = _first_ranks(hosts)
    offsets: dict[str, float] = {}
    for rank in firsts[1:]:
        if place.rank == 0:
            offsets[hosts[rank]] = min((_ping(rank) for _ in range(_PINGS)), key=lambda found: found[1])[0]
        elif place.rank == rank:
            for _ in range(_PINGS):
                _answer()
    if place.rank != 0:
        return []
    worst, skew = max(offsets.items(), key=lambda item: abs(item[1]), default=("", 0.0))
    if not offsets:
        return [ok("clocks", "one machine")]
    detail = f"{worst} is {skew:+.3f} s from {hosts[0]}, the most of {len(firsts)} machines"
    if abs(skew) > _MOST_SKEW_S:
        fix = "run chrony or ntpd on every node (timedatectl); logs, checkpoint times and lock ages go by the clock"
        return [warn("clocks", detail, fix)]
    return [ok("clocks", detail)]


def _ping(rank: int) -> tuple[float, float]:
    """Return how far a rank's clock is ahead of this one's, and the round trip, in seconds."""
    theirs = torch.zeros(1, dtype=torch.float64)
    before = time.time()
    dist.send(theirs, rank)
    dist.recv(theirs, rank)
    after = time.time()
    return float(theirs) - (before + after) / 2, after - before


def _answer() -> None:
    word = torch.zeros(1, dtype=torch.float64)
    dist.recv(word, 0)
    dist.send(torch.tensor([time.time()], dtype=torch.float64), 0)


def check_shared(folder: Path, hosts: Sequence[str], place: Place) -> list[Finding]:
    """See whether what rank 0 writes into a folder is seen by every machine, and the other way round."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    name: str = shared(f".megatron_csbp-doctor-{time.time_ns()}")
    mine, reply = there / name, there / f"{name}.{place.rank}"
    is_first = place.rank in _first_ranks(hosts)
    said = ""
    if place.rank == 0:
        said = _try(lambda: mine.write_text(name))
    dist.barrier()
    seen: float | None = 0.0
    if is_first:
        seen = _seconds_until(lambda: mine.read_text() == name)
        said = said or _try(reply.touch)
    seen_by = gathered((seen, said))
    findings: list[Finding] = []
    if place.rank == 0:
        replies = {rank: there / f"{name}.{rank}" for rank in _first_ranks(hosts)}
        back = {rank: _seconds_until(path.exists) for rank, path in replies.items()}
        findings = [_shared_finding(folder, hosts, seen_by, back)]
    dist.barrier()
    for path in (mine, reply):
        _try(partial(path.unlink, missing_ok=True))
    return findings


def _shared_finding(
    folder: Path, hosts: Sequence[str], seen_by: Sequence[tuple[float | None, str]], back: dict[int, float | None]
) -> Finding:
    title = f"shared folder {folder}"
    blind = [hosts[rank] for rank in back if seen_by[rank][0] is None or back[rank] is None]
    errors = [f"{hosts[rank]}: {seen_by[rank][1]}" for rank in back if seen_by[rank][1]]
    if errors:
        fix = "mount it read-write on every node (pyxis: --container-mounts without :ro), or name another folder"
        return fail(title, f"cannot be written into on {'; '.join(errors)}", fix)
    if blind:
        detail = f"files are not seen within {_SEES_S:.0f} s between {hosts[0]} and {', '.join(blind)}"
        fix = "name a folder of a file system that all nodes mount at this path; on NFS, shorter attribute caching"
        return fail(title, detail, fix)
    slowest = max(max(seen_by[rank][0] or 0.0, back[rank] or 0.0) for rank in back)
    return ok(title, f"seen by {len(back)} machine(s), both ways, within {slowest:.2f} s")


def _first_ranks(hosts: Sequence[str]) -> list[int]:
    """Return the first rank of each machine."""
    return [hosts.index(host) for host in dict.fromkeys(hosts)]


def _seconds_until(is_so: Any) -> float | None:
    """Wait until something is so; return how long it took, None if it took too long."""
    started = time.monotonic()
    while time.monotonic() - started < _SEES_S:
        try:
            if is_so():
                return time.monotonic() - started
        except OSError:
            pass
        time.sleep(0.02)
    return None


def _try(act: Any) -> str:
    """Do something with a file; return what went wrong, or nothing."""
    try:
        act()
    except OSError as error:
        return error.strerror or str(error)
    return ""
