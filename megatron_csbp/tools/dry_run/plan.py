# SPDX-License-Identifier: Apache-2.0
"""All that the planner says of one job, and of the same job under other schemes. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_csbp.tools.dry_run.job import Job
from megatron_csbp.tools.dry_run.memory import RankMemory, rank_memories
from megatron_csbp.tools.dry_run.network import Layer
from megatron_csbp.tools.dry_run.operations import Operations, useful_operations
from megatron_csbp.tools.dry_run.step_time import StepTime, machine_of, step_time
from megatron_csbp.tools.dry_run.tables import Tables
from megatron_csbp.tools.dry_run.traffic import LayerTraffic, StageTraffic, layer_traffic, stage_traffic
from megatron_csbp.transformer.geometry.scheme import Scheme

SCHEMES = {
    "cp": Scheme.CONTEXT_PARALLEL,
    "bp": Scheme.BLOCK_PARALLEL,
    "csbp": Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL,
}
"""Values of `--compare`."""


@dataclass(frozen=True)
class Cluster:
    """Where a job runs.

    Attributes:
        tables: what is taken for granted.
        gpu: name of the GPU among them.
        node: GPUs of a node.
    """

    tables: Tables
    gpu: str
    node: int


@dataclass(frozen=True)
class Plan:
    """What the planner says of a job.

    Attributes:
        job: the job.
        cluster: where it runs.
        memories: of a rank of each kind.
        layers: what a layer of each kind receives for one micro-batch, by a name for the kind.
        traffic: what a rank of each kind receives in an iteration, in the order of `memories`.
        operations: useful operations of a sample.
        time: of an iteration.
    """

    job: Job
    cluster: Cluster
    memories: tuple[RankMemory, ...]
    layers: dict[str, LayerTraffic]
    traffic: tuple[StageTraffic, ...]
    operations: Operations
    time: StepTime

    @property
    def fits(self) -> bool:
        """Whether every kind of rank fits its GPU."""
        return all(memory.fits for memory in self.memories)

    @property
    def fullest(self) -> RankMemory:
        """The kind of rank that holds most."""
        return max(self.memories, key=lambda memory: memory.total)


def make_plan(job: Job, cluster: Cluster) -> Plan:
    """Plan a job.

    Raises:
        ValueError: the GPU is in no table.
    """
    gpu = cluster.tables.gpu(cluster.gpu)
    kinds: dict[str, tuple[Layer, bool]] = {}
    for stage in range(job.topology.pipeline):
        for index, layer in job.stage_layers(stage):
            kinds.setdefault(_kind_name(job, layer), (layer, job.recompute.takes_layer(index)))
    return Plan(
        job=job,
        cluster=cluster,
        memories=tuple(rank_memories(job.of_fullest_sample(), gpu)),
        layers={name: layer_traffic(job, layer, recomputed) for name, (layer, recomputed) in kinds.items()},
        traffic=tuple(stage_traffic(job, stage) for stage in job.stage_kinds().values()),
        operations=useful_operations(job),
        time=step_time(job, machine_of(job, gpu, cluster.tables, cluster.node)),
    )


def _kind_name(job: Job, layer: Layer) -> str:
    window = "" if layer.window is None else f" of {layer.window}"
    experts = ", experts" if layer.has_experts else ""
    last = ", last layer without clean rows" if job.drops_in(layer) else ""
    return f"{layer.kind}{window}{experts}{last}"


def compare(job: Job, cluster: Cluster, schemes: Sequence[str]) -> dict[str, Plan]:
    """Plan the same job under several schemes, with head groups chosen anew for each.

    Args:
        job: the job; its context group has more than one rank.
        cluster: where it runs.
        schemes: keys of `SCHEMES`.

    Raises:
        ValueError: a scheme is unknown, or the job has no context group.
    """
    unknown = [name for name in schemes if name not in SCHEMES]
    if unknown or not schemes:
        raise ValueError(f"--compare {','.join(schemes)} must name some of {', '.join(SCHEMES)}, such as cp,csbp.")
    if job.topology.context == 1:
        raise ValueError(
            "--compare needs a context group: with one rank all schemes are the same. Give --context-parallel-size "
            "and --bp-size above 1."
        )
    return {name: make_plan(replace(job.with_scheme(SCHEMES[name]), head_groups=None), cluster) for name in schemes}
