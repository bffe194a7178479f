# SPDX-License-Identifier: Apache-2.0
"""How long an iteration takes, by part. Pure: modelled from rates, not measured; see `ASSUMPTIONS`."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_csbp.tools.dry_run.job import Job
from megatron_csbp.tools.dry_run.layer_time import (
    Machine,
    PassTime,
    backward_time,
    forward_time,
    loss_time,
    repeated_time,
)
from megatron_csbp.tools.dry_run.network import Layer
from megatron_csbp.tools.dry_run.operations import useful_operations
from megatron_csbp.tools.dry_run.tables import Gpu, Link, Tables
from megatron_csbp.tools.dry_run.traffic import hidden_bytes, stage_traffic

ASSUMPTIONS = (
    "matrix products and attention reach the rates of the GPU's table, whatever their shape",
    "a collective and the computation beside it do not slow each other down; it reaches its link's efficiency",
    "each pass hides exchanges as transformer/attention.py orders them: gathers behind tiles, one at a time",
    "sums of tensor and expert parallelism and pipeline transfers are not hidden; rows go to experts evenly",
    "pipeline stages wait for the slowest; (stages - 1) / chunks micro-batches of it are idle time",
    "gradients are summed beside the last micro-batch's backward pass, weights gathered beside the first forward pass",
    "data loading, logging, checkpoints and evaluation take no time; no GPU is slower than another",
)
_BUCKET = 40_000_000
"""Parameters of a gradient bucket, Megatron's default at least: the last one cannot hide."""
_OPTIMIZER_BYTES = 30
"""Read and written for each parameter that a rank updates: gradient, fp32 copy and two moments, weight."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """An iteration, modelled.

    Attributes:
        parts: seconds by part, on the busiest pipeline stage; they add up to the iteration.
        exposed: of it, seconds in which attention and delta nets wait for their exchanges.
        mfu: useful operations over what all GPUs could do in that time at their peak.
        tokens_per_second: clean tokens of all ranks.
        days: of the whole run; None if it has no number of iterations.
    """

    parts: Mapping[str, float]
    exposed: float
    mfu: float
    tokens_per_second: float
    days: float | None

    @property
    def seconds(self) -> float:
        """Of the iteration."""
        return sum(self.parts.values())


def machine_of(job: Job, gpu: Gpu, tables: Tables, node: int) -> Machine:
    """Return the links that the job's groups use: the fast one where a group's ranks are of one node."""
    top = job.topology

    def link(ranks: int) -> Link:
        return tables.links[gpu.node_link if ranks <= node else gpu.network_link]

    inner = top.tensor * top.context
    experts = top.expert_tensor * top.expert
    return Machine(gpu, link(inner), link(top.tensor), link(experts), link(top.gpus))


def step_time(job: Job, machine: Machine) -> StepTime:
    """Return the modelled time of an iteration."""
    slowest: dict[str, float] = {}
    exposed = 0.0
    for stage in range(job.topology.pipeline):
        parts, waits = _micro_batch(job, machine, stage)
        if sum(parts.values()) > sum(slowest.values()):
            slowest, exposed, busiest = parts, waits, stage
    count, top = job.micro_batches, job.topology
    found = {name: seconds * count for name, seconds in slowest.items()}
    exposed *= count
    whole = sum(slowest.values())
    if top.pipeline > 1:
        found["pipeline: idle"] = whole * (top.pipeline - 1) / top.virtual
        found["pipeline: transfers"] = machine.wide.seconds(
            2 * top.virtual * count * hidden_bytes(job, job.shared_rows), 2 * count * top.virtual
        )
    found |= _update(job, machine, busiest, whole)
    seconds = sum(found.values())
    useful = useful_operations(job).total * job.global_batch
    return StepTime(
        parts={name: value for name, value in found.items() if value},
        exposed=exposed,
        mfu=useful / (seconds * top.gpus * machine.gpu.peak_tflops * 1e12),
        tokens_per_second=job.length * job.global_batch / seconds,
        days=job.iterations * seconds / 86400 if job.iterations else None,
    )


def _micro_batch(job: Job, machine: Machine, stage: int) -> tuple[dict[str, float], float]:
    """Return the seconds of a micro-batch on a stage by part, and those in which attention waits."""
    parts: dict[str, float] = defaultdict(float)
    exposed = 0.0
    known: dict[tuple[object, ...], list[PassTime]] = {}
    for index, layer in job.stage_layers(stage):
        recomputed = job.recompute.takes_layer(index)
        key = (layer.kind, layer.window, layer.has_experts, job.drops_in(layer), recomputed)
        if key not in known:
            known[key] = _passes(job, layer, machine, recomputed)
        for passed in known[key]:
            parts["linear layers"] += passed.linear
            parts["attention: tiles"] += passed.attention.seconds - passed.attention.exposed
            parts["attention: waits for exchanges"] += passed.attention.exposed
            parts["delta nets: recurrence"] += passed.states.seconds - passed.states.exposed
            parts["delta nets: waits for exchanges"] += passed.states.exposed
            parts["norms, activations, residuals"] += passed.pointwise
            parts["tensor parallelism"] += passed.tensor
            parts["expert parallelism"] += passed.experts
            exposed += passed.attention.exposed + passed.states.exposed
    if job.is_last(stage):
        parts["logits and loss"] += loss_time(job, machine)
    return parts, exposed


def _passes(job: Job, layer: Layer, machine: Machine, recomputed: bool) -> list[PassTime]:
    return [
        forward_time(job, layer, machine),
        repeated_time(job, layer, machine, recomputed),
        backward_time(job, layer, machine, recomputed),
    ]


def _update(job: Job, machine: Machine, stage: int, micro_batch: float) -> dict[str, float]:
    """Return what an iteration takes besides its micro-batches: sums of gradients, the optimizer, gathered weights."""
    moved, counted, top = stage_traffic(job, stage), job.stage_parameters(stage), job.topology
    sums = machine.wide.seconds(moved.gradients)
    if job.overlaps_gradients and moved.gradients:
        last_bucket = sums * min(1.0, _BUCKET / counted.total)
        sums = max(last_bucket, sums - micro_batch * 2 / 3)
    gathers = machine.wide.seconds(moved.weights)
    if job.overlaps_weights and job.distributed_optimizer:
        gathers = max(0.0, gathers - micro_batch / 3)
    share = top.gradient_group if job.distributed_optimizer else 1
    touched = counted.total * (_OPTIMIZER_BYTES / share + job.precision.gradients)
    return {
        "gradients: not hidden": sums,
        "weights: not hidden": gathers,
        "optimizer": touched / (machine.gpu.memory_tbytes * 1e12),
    }
