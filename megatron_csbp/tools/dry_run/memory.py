# SPDX-License-Identifier: Apache-2.0
"""Memory of one rank of a pipeline stage at its fullest, by part. Pure: modelled, no tensor is made."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_csbp.tools.dry_run import activations, workspace
from megatron_csbp.tools.dry_run.job import Job
from megatron_csbp.tools.dry_run.tables import Gpu

_GIB = 2**30
_INPUTS = "activations: inputs of recomputed layers"


@dataclass(frozen=True)
class RankMemory:
    """What a rank of one kind holds.

    Attributes:
        kind: first stage, last stage, ...
        stage: a pipeline rank of that kind.
        parameters: on the rank.
        held: bytes that are there through all of a backward pass, by what they are for.
        moments: what comes on top at each of its full moments: name -> bytes by what they are for.
        capacity: bytes of the GPU.
    """

    kind: str
    stage: int
    parameters: int
    held: Mapping[str, int]
    moments: Mapping[str, Mapping[str, int]]
    capacity: int

    @property
    def fullest(self) -> str:
        """The fullest moment."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def parts(self) -> dict[str, int]:
        """Bytes at the fullest moment, by what they are for."""
        return {**self.held, **self.moments[self.fullest]}

    @property
    def total(self) -> int:
        """Bytes at the fullest moment."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether the GPU has as much."""
        return self.total <= self.capacity


def rank_memories(job: Job, gpu: Gpu) -> list[RankMemory]:
    """Return the memory of a rank of each kind: of the fullest one where there are several."""
    return [_rank_memory(job, gpu, kind, stage) for kind, stage in job.stage_kinds().items()]


def state_bytes(job: Job, stage: int) -> dict[str, int]:
    """Return the bytes of weights, gradients and optimizer on a rank of a pipeline stage."""
    precision, counted = job.precision, job.stage_parameters(stage)
    top = job.topology
    shares = (top.gradient_group, top.expert_gradient_group) if job.distributed_optimizer else (1, 1)
    held = -(-counted.dense // shares[0]) + -(-counted.experts // shares[1])
    return {
        "weights": counted.total * precision.weights,
        "gradients": counted.total * precision.gradients,
        "optimizer": held * precision.optimizer,
    }


def in_flight(job: Job, stage: int) -> int:
    """Return how many micro-batches of one model chunk a rank holds at a time at most, over all of its chunks."""
    top = job.topology
    total = job.micro_batches * top.virtual
    if top.virtual == 1:
        return min(total, top.pipeline - stage)
    return min(total, 2 * (top.pipeline - stage - 1) + (top.virtual - 1) * top.pipeline + 1)


def activation_bytes(job: Job, stage: int) -> dict[str, int]:
    """Return the bytes that all micro-batches in flight on a rank keep, by kind of layer."""
    kept: dict[str, int] = defaultdict(int)
    for chunk in job.stage_chunks[stage]:
        for index, layer in enumerate(chunk):
            if not job.recompute.takes_layer(index):
                kept[f"activations: {layer.kind}"] += activations.saved_by_mixer(job, layer)
                mlp = "experts" if layer.has_experts else "MLP"
                kept[f"activations: {mlp}"] += activations.saved_by_mlp(job, layer)
            elif index % job.recompute.per_checkpoint == 0:
                kept[_INPUTS] += activations.kept_input(job)
    chunks, alive = job.topology.virtual, in_flight(job, stage)
    return {name: size * alive // chunks for name, size in kept.items()}


def full_moments(job: Job, stage: int) -> dict[str, dict[str, int]]:
    """Return what the layer at work, or the loss, needs besides what is kept, at each full moment of a step."""
    moments: dict[str, dict[str, int]] = {}

    def enter(name: str, parts: dict[str, int]) -> None:
        found = {part: size for part, size in parts.items() if size}
        if name not in moments or sum(found.values()) > sum(moments[name].values()):
            moments[name] = found

    for index, layer in job.stage_layers(stage):
        again = job.recompute.per_checkpoint if job.recompute.takes_layer(index) else 0
        saved = again * activations.saved_by_layer(job, layer)
        mlp = activations.saved_by_mlp(job, layer) if again else 0
        # When attention runs backward, its MLP is done and what that saved is gone.
        mixer = workspace.mixer_memory(job, layer)
        parts = {"gather buffers": mixer.buffers, "workspace": mixer.workspace}
        enter(f"{layer.kind} backward", {"recomputed layer": saved - mlp, **parts})
        enter("MLP backward", {"recomputed layer": saved, "workspace": workspace.mlp_workspace(job, layer)})
    if job.is_last(stage):
        enter("loss", {"logits": workspace.logits_bytes(job)})
    return moments or {"nothing": {}}


def _rank_memory(job: Job, gpu: Gpu, kind: str, stage: int) -> RankMemory:
    held = state_bytes(job, stage) | activation_bytes(job, stage)
    if job.is_last(stage):
        held["hidden states of the loss"] = workspace.loss_rows_bytes(job)
    held["reserved (assumed)"] = round(gpu.reserved_gib * _GIB)
    return RankMemory(
        kind,
        stage,
        job.stage_parameters(stage).total,
        {name: size for name, size in held.items() if size},
        full_moments(job, stage),
        round(gpu.memory_gib * _GIB),
    )
