# SPDX-License-Identifier: Apache-2.0
"""Topologies that divide a cluster: which fit and how fast they would be, best first, and why others do not. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_csbp.tools.dry_run.job import Job
from megatron_csbp.tools.dry_run.plan import Cluster, Plan, make_plan
from megatron_csbp.tools.dry_run.topology import Topology
from megatron_csbp.transformer.geometry.scheme import Scheme, length_error, required_multiple

_GIB = 2**30


@dataclass(frozen=True)
class Candidate:
    """A topology of the sweep.

    Attributes:
        topology: the topology.
        plan: what the planner says of it; None if a rule forbids it.
        reason: why it does not work; empty if it does.
    """

    topology: Topology
    plan: Plan | None
    reason: str


def sweep(job: Job, cluster: Cluster) -> list[Candidate]:
    """Plan a job on every topology of its cluster: those that fit by their time, then those that do not fit.

    The scheme stays, or is CSBP where the job itself has no context group. Batch sizes, recomputation and expert
    parallelism stay as they are.

    Args:
        job: the job.
        cluster: where it runs.
    """
    found = [_candidate(job, topology, cluster) for topology in topologies(job, cluster.node)]
    return sorted(found, key=_order)


def _order(candidate: Candidate) -> tuple[int, float]:
    if candidate.plan is None:
        return 2, 0.0
    if candidate.reason:
        return 1, candidate.plan.fullest.total
    return 0, candidate.plan.time.seconds


def topologies(job: Job, node: int) -> Iterator[Topology]:
    """Yield tensor, pipeline and context sizes whose product divides the number of GPUs.

    Tensor parallelism stays inside a node, and takes sequence parallelism with it.
    """
    old, gpus = job.topology, job.topology.gpus
    scheme = Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL if old.scheme is Scheme.SINGLE else old.scheme
    for tensor in _divisors(min(gpus, node)):
        for pipeline in _divisors(gpus // tensor) if gpus % tensor == 0 else ():
            for context in _divisors(gpus // (tensor * pipeline)):
                yield replace(
                    old,
                    tensor=tensor,
                    pipeline=pipeline,
                    context=context,
                    virtual=1,
                    scheme=scheme if context > 1 else Scheme.SINGLE,
                    sequence_parallel=tensor > 1,
                    expert_tensor=old.expert_tensor if old.expert_tensor != old.tensor else tensor,
                )


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def why_not(job: Job, top: Topology) -> str:
    """Return which rule of Megatron's or of this package's forbids a topology; empty if none does."""
    network = job.network
    multiple = required_multiple(job.block_size, top.context)
    batch = job.micro_batch * top.data
    layers = len(network.layers)
    few, many = sorted((network.key_heads, top.tensor))
    rules = {
        length_error(job.length, job.block_size, top.context): job.length % multiple,
        f"tensor size {top.tensor} does not divide {network.query_heads} query heads": network.query_heads
        % top.tensor,
        f"tensor size {top.tensor} and {network.key_heads} key/value heads: neither divides the other": many % few,
        f"tensor size {top.tensor} does not divide the MLP's width or the vocabulary": network.ffn % top.tensor
        or network.vocab % top.tensor,
        f"{top.pipeline} stages do not divide {layers} layers": layers % top.pipeline,
        f"{batch} sequences at a time do not divide --global-batch-size {job.global_batch}": job.global_batch % batch,
        f"expert size {top.expert} does not divide the ranks of a stage": (top.gpus // top.pipeline)
        % (top.expert * top.expert_tensor),
    }
    if network.delta_net is not None:
        heads = min(network.delta_net.key_heads, network.delta_net.value_heads)
        rules["heads of the delta nets over tensor and context ranks"] = heads % (top.tensor * top.context)
    return next((reason for reason, is_broken in rules.items() if is_broken), "")


def _candidate(job: Job, topology: Topology, cluster: Cluster) -> Candidate:
    reason = why_not(job, topology)
    if reason:
        return Candidate(topology, None, reason)
    plan = make_plan(replace(job, topology=topology, stages=(), head_groups=None, chunk_rows=None), cluster)
    if plan.fits:
        return Candidate(topology, plan, "")
    fullest = plan.fullest
    part, size = max(fullest.parts.items(), key=lambda item: item[1])
    over = (fullest.total - fullest.capacity) / _GIB
    return Candidate(
        topology, plan, f"{fullest.kind}: {over:.1f} GiB too many ({part}: {size / _GIB:.1f} GiB the largest part)"
    )
