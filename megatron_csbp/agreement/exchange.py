# SPDX-License-Identifier: Apache-2.0
"""The ranks compare what they know before any process group exists, through the store of the rendezvous.

A process group cannot do it: ranks that disagree on a size make different groups, and hang there. The store is the
one that `init_process_group` will use, at MASTER_ADDR:MASTER_PORT: torchrun's own, or served by rank 0. Each rank
leaves a digest there; only where digests differ are the facts themselves read.
"""

import json
import os
import time
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from megatron_csbp.agreement.differences import Facts, digest, disagreement, ranks_in_words

_AGREED, _DIFFER = "agreed", "differ"
_SERVES_S = 10.0
"""How long rank 0, which may serve the store, waits for the others to read why the run ends."""
_CONNECTS_S = 60.0

# Kept until the process ends: `init_process_group` shares the server, and its last owner would close it.
_STORES: list[TCPStore] = []


def job_store(environ: Mapping[str, str], timeout_s: float) -> Store:
    """Return the store of a job, under a prefix of its own for every call and every restart of torchrun.

    Args:
        environ: what the launcher has set: RANK, MASTER_ADDR, MASTER_PORT.
        timeout_s: how long to wait for a key.

    Raises:
        ValueError: nobody answers at the address, or the port is taken by something else.
    """
    address, port = environ["MASTER_ADDR"], environ["MASTER_PORT"]
    is_torchruns = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = TCPStore(
            address,
            int(port),
            is_master=environ["RANK"] == "0" and not is_torchruns,
            timeout=timedelta(seconds=min(timeout_s, _CONNECTS_S) if is_torchruns else timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, OSError) as error:
        raise ValueError(
            f"MASTER_ADDR={address} MASTER_PORT={port}: the ranks cannot meet there ({_first_line(error)}). Check "
            "that rank 0 runs on that machine, that its name resolves on every node, and that no other program or job "
            "has the port; then choose another MASTER_PORT, or with torchrun --master-port or --rdzv-endpoint."
        ) from error
    _STORES.append(store)
    names = (environ.get("TORCHELASTIC_RUN_ID", ""), environ.get("TORCHELASTIC_RESTART_COUNT", ""), len(_STORES))
    return PrefixStore("/".join(["megatron_csbp", *map(str, names)]), store)


def store_after_restart(environ: Mapping[str, str], timeout_s: float) -> Store | None:
    """Return a store for the process groups of ranks that torchrun has started again; None for a first start.

    torchrun keeps its store, and with it the addresses of ranks that are gone: a rank that comes early would connect
    to them. Under a prefix of its own a restart finds none.
    """
    if environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" or "MASTER_ADDR" not in environ:
        return None
    return job_store(environ, timeout_s)


def check_agreement(store: Store, rank: int, world_size: int, facts: Facts, timeout_s: float) -> None:
    """Compare facts with those of all other ranks. All ranks call.

    Args:
        store: of the job.
        rank: of this process.
        world_size: ranks of the job.
        facts: what must be equal on all ranks.
        timeout_s: how long to wait for the slowest rank.

    Raises:
        ValueError: the same on every rank: facts differ, or a rank has not come.
    """
    deadline = time.monotonic() + timeout_s
    store.set(f"digest/{rank}", digest(facts))
    if rank == 0:
        store.set("verdict", _verdict(store, world_size, deadline, timeout_s))
    verdict = _read(store, "verdict", deadline + _SERVES_S)
    if verdict == _AGREED:
        return
    if verdict == _DIFFER:
        store.set(f"facts/{rank}", json.dumps({"host": os.uname().nodename, "facts": dict(facts)}))
        if rank == 0:
            store.set("why", _why(store, world_size))
        verdict = _read(store, "why", time.monotonic() + 2 * _SERVES_S)
    store.add("readers", 1)
    if rank == 0:
        last = time.monotonic() + _SERVES_S
        present = sum(store.check([f"digest/{other}"]) for other in range(world_size))
        while store.add("readers", 0) < present and time.monotonic() < last:
            time.sleep(0.05)
    raise ValueError(verdict)


def _verdict(store: Store, world_size: int, deadline: float, timeout_s: float) -> str:
    """Wait for the digests of all ranks and compare them; rank 0 alone does."""
    keys = [f"digest/{rank}" for rank in range(world_size)]
    try:
        store.wait(keys, timedelta(seconds=max(deadline - time.monotonic(), 1.0)))
    except DistStoreError:
        absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
        return (
            f"{ranks_in_words(absent)} of {world_size} had not come to the comparison of starts after {timeout_s:.0f} "
            "s (--distributed-timeout-minutes). Look at the end of their logs: they have failed, hang, for example "
            "in a file system, or were never started."
        )
    return _AGREED if len(set(store.multi_get(keys))) == 1 else _DIFFER


def _why(store: Store, world_size: int) -> str:
    """Read the facts of all ranks, and say where they differ; rank 0 alone does."""
    keys = [f"facts/{rank}" for rank in range(world_size)]
    try:
        store.wait(keys, timedelta(seconds=_SERVES_S))
    except DistStoreError:
        return (
            f"the ranks of this job do not agree, and not all said why within {_SERVES_S:.0f} s; look at their logs."
        )
    of_ranks = [json.loads(value) for value in store.multi_get(keys)]
    return disagreement([found["facts"] for found in of_ranks], [found["host"] for found in of_ranks])


def _read(store: Store, key: str, deadline: float) -> str:
    try:
        store.wait([key], timedelta(seconds=max(deadline - time.monotonic(), 1.0)))
        return str(store.get(key), "utf-8")
    except (DistStoreError, DistNetworkError) as error:
        raise ValueError(
            f"rank 0 did not answer in the comparison of starts ({_first_line(error)}); look at the end of its log."
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0].rstrip(". ")
