# SPDX-License-Identifier: Apache-2.0
"""How long the all-gather of the context groups takes, at the size of the run. All ranks call."""

import statistics
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_csbp.doctor.findings import Finding, fail, ok, warn
from megatron_csbp.doctor.group import MEETS_S, gathered
from megatron_csbp.doctor.launcher import Place
from megatron_csbp.tools.dry_run.tables import read_tables

_WARM_UPS, _GATHERS = 2, 5
_SLOW_FACTOR = 1.5
_DEFAULT_GATHER_BYTES = 64 << 20


def check_gather(
    place: Place, tensor: int, context: int, gather_bytes: int, hosts: Sequence[str] = ()
) -> list[Finding]:
    """Time the all-gather of every context group at once, at the size of the run.

    Args:
        place: of this process.
        tensor: tensor-parallel size: ranks of a context group are so far apart.
        context: ranks of a context group.
        gather_bytes: what a rank gets from the others; 0 for a size of no particular run.
        hosts: the machine of each rank.
    """
    name = "all-gather of the context groups"
    if context < 2 or place.world_size % (tensor * context):
        context, tensor = place.world_size, 1
    shard_bytes = max((gather_bytes or _DEFAULT_GATHER_BYTES) // (context - 1), 1)
    is_cuda = torch.cuda.is_available()
    backend = "nccl" if is_cuda else "gloo"
    device = torch.device("cuda", place.local_rank) if is_cuda else torch.device("cpu")
    mine: dist.ProcessGroup | None = None
    for ranks in context_groups(place.world_size, tensor, context):
        group = dist.new_group(ranks, backend=backend, timeout=timedelta(seconds=MEETS_S))
        mine = group if isinstance(group, dist.ProcessGroup) and place.rank in ranks else mine
    assert mine is not None
    try:
        seconds: float | str = _gather_seconds(mine, shard_bytes, context, device)
    except RuntimeError as error:
        seconds = str(error).splitlines()[0]
    of_ranks = gathered(seconds)
    if place.rank != 0:
        return []
    wrong = [f"rank {rank}: {value}" for rank, value in enumerate(of_ranks) if isinstance(value, str)]
    if wrong:
        return [
            fail(name, f"{backend}: {'; '.join(wrong[:4])}", "NCCL_DEBUG=INFO shows which link or interface fails")
        ]
    groups = context_groups(place.world_size, tensor, context)
    crosses = bool(hosts) and any(len({hosts[rank] for rank in ranks}) > 1 for ranks in groups)
    assumed = assumed_seconds(torch.cuda.get_device_name(), shard_bytes * (context - 1), crosses) if is_cuda else None
    return [_gather_finding(name, backend, of_ranks, shard_bytes, context, tensor, assumed)]


def context_groups(world_size: int, tensor: int, context: int) -> list[list[int]]:
    """Return the ranks of each context group, in Megatron's order: tensor-parallel ranks are neighbours."""
    return [
        [first + tensor * place + offset for place in range(context)]
        for first in range(0, world_size, tensor * context)
        for offset in range(tensor)
    ]


def assumed_seconds(gpu: str, num_bytes: int, crosses_nodes: bool) -> float | None:
    """Return how long the planner takes a gather to last; None for a GPU that its tables do not have.

    Args:
        gpu: the device's name, "NVIDIA H200".
        num_bytes: what a rank gets from the others.
        crosses_nodes: whether a group spreads over machines.
    """
    tables = read_tables()
    kind = next((tables.gpu(name) for name in tables.gpus if name in gpu.lower()), None)
    if kind is None:
        return None
    link = tables.links[kind.network_link if crosses_nodes else kind.node_link]
    return link.seconds(num_bytes)


def _gather_seconds(group: dist.ProcessGroup, shard_bytes: int, size: int, device: torch.device) -> float:
    """Return the median time of a gather, on this rank."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    shard = torch.zeros(shard_bytes, dtype=torch.uint8, device=device)
    whole = torch.zeros(shard_bytes * size, dtype=torch.uint8, device=device)
    times = []
    for _ in range(_WARM_UPS + _GATHERS):
        dist.barrier()
        started = time.perf_counter()
        dist.all_gather_into_tensor(whole, shard, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[_WARM_UPS:])


def _gather_finding(
    name: str,
    backend: str,
    seconds: Sequence[float],
    shard_bytes: int,
    context: int,
    tensor: int,
    assumed: float | None = None,
) -> Finding:
    groups = context_groups(len(seconds), tensor, context)
    slowest_of = [max(seconds[rank] for rank in ranks) for ranks in groups]
    usual, slowest = statistics.median_low(slowest_of), max(slowest_of)
    received = shard_bytes * (context - 1)
    detail = (
        f"{received / 2**20:.2f} MiB from {context - 1} other rank(s) by {backend} in {usual * 1e3:.2f} ms: "
        f"{received / usual / 1e9:.2f} GB/s a rank, {len(groups)} group(s) at once"
    )
    if assumed is not None:
        detail += f" (the planner assumes {assumed * 1e3:.2f} ms)"
    if slowest > _SLOW_FACTOR * usual:
        ranks = groups[slowest_of.index(slowest)]
        fix = "look at the links of these ranks' nodes (nvidia-smi nvlink -e, ibstat), or leave a node out"
        return warn(name, f"{detail}; the group of ranks {ranks} takes {slowest * 1e3:.2f} ms", fix)
    if assumed is not None and usual > _SLOW_FACTOR * assumed:
        fix = "look at the links (nvidia-smi topo -m, ibstat, NCCL_DEBUG=INFO), or change the planner's tables"
        return warn(name, detail, fix)
    return ok(name, detail)
