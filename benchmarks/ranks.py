# SPDX-License-Identifier: Apache-2.0
"""Ranks of a measurement: forked processes, one core each, in the namespaces of a `Network` if there is one."""

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.network import INTERFACE, Network

TIMEOUT_SECONDS = 900.0


@dataclass(frozen=True)
class RankWorld:
    """What a measurement knows on a rank.

    Attributes:
        rank: this rank.
        size: P, ranks.
        core: the processor core that this rank is pinned to.
        group: the process group of all ranks (gloo).
    """

    rank: int
    size: int
    core: int
    group: dist.ProcessGroup


class RankFailedError(RuntimeError):
    """A rank of a measurement failed; the message holds its traceback."""


def cores() -> list[int]:
    """Return the processor cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def is_oversubscribed(size: int) -> bool:
    """Return whether some ranks have to share a core."""
    return size > len(cores())


def run_on_ranks[T](
    measure: Callable[[RankWorld, Any], T],
    argument: Any,
    size: int,
    network: Network | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> list[T]:
    """Run `measure(world, argument)` on every rank of a new world and return the results by rank.

    Args:
        measure: the measurement.
        argument: passed to every rank.
        size: number of ranks.
        network: namespaces to run in; None runs all ranks on the loopback interface.
        timeout_seconds: after this the ranks are killed.

    Raises:
        RankFailedError: a rank raised, died, or took too long.
    """
    context = multiprocessing.get_context("fork")  # a spawned rank would import torch again
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = [], []
        for rank in range(size):
            receiving, sending = context.Pipe(duplex=False)
            arguments = (measure, argument, rank, size, network, Path(folder) / "store", sending)
            process = context.Process(target=_be_rank, args=arguments, daemon=True)
            process.start()
            sending.close()
            processes.append(process)
            pipes.append(receiving)
        try:
            deadline = time.monotonic() + timeout_seconds
            return [_receive(pipe, rank, deadline) for rank, pipe in enumerate(pipes)]
        finally:
            for process in processes:
                process.join(timeout=5)
                process.kill()
                process.join()


def _receive(pipe: "Connection[Any, Any]", rank: int, deadline: float) -> Any:
    try:
        if not pipe.poll(max(0.0, deadline - time.monotonic())):
            raise RankFailedError(f"rank {rank} did not finish in time")
        result, error = pipe.recv()
    except EOFError:
        raise RankFailedError(f"rank {rank} died") from None
    if error is not None:
        raise RankFailedError(f"rank {rank} failed:\n{error}")
    return result


def _be_rank(
    measure: Callable[[RankWorld, Any], Any],
    argument: Any,
    rank: int,
    size: int,
    network: Network | None,
    store: Path,
    pipe: "Connection[Any, Any]",
) -> None:
    try:
        available = cores()
        core = available[rank % len(available)]
        os.sched_setaffinity(0, {core})
        torch.set_num_threads(1)
        if network is not None:
            # Before the first thread: a thread keeps the namespace that it started in.
            with Path(f"/run/netns/{network.namespace(rank)}").open() as namespace:
                os.setns(namespace.fileno(), os.CLONE_NEWNET)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE if network is not None else "lo"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        group = dist.group.WORLD
        assert group is not None
        pipe.send((measure(RankWorld(rank, size, core, group), argument), None))
        dist.destroy_process_group()
    except BaseException:
        pipe.send((None, traceback.format_exc()))
