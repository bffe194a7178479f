# SPDX-License-Identifier: Apache-2.0
"""Bytes that other ranks send to one rank, by kind. Pure: from the plans that training executes.

Attention and delta nets by layer and micro-batch, exactly as the ledger counts them; what Megatron moves besides by
the closed forms of its collectives: (n-1)/n of a buffer for an all-gather or a reduce-scatter of n ranks, twice that
for an all-reduce.
"""

from dataclasses import dataclass

from megatron_csbp.tools.dry_run.job import Job
from megatron_csbp.tools.dry_run.network import Layer
from megatron_csbp.transformer.delta_net.traffic import layer_volumes
from megatron_csbp.transformer.geometry.scheme import CopyKind
from megatron_csbp.transformer.traffic_ledger import total


@dataclass(frozen=True, kw_only=True)
class LayerTraffic:
    """What one layer receives for one micro-batch.

    Attributes:
        clean: keys, values and their gradients of the clean copy, or states and rows of a delta net.
        corrupted: keys, values and their gradients of corrupted copies: the CP baseline's.
        tensor: tensor parallelism.
        experts: expert parallelism, if rows go to experts evenly.
    """

    clean: int = 0
    corrupted: int = 0
    tensor: int = 0
    experts: int = 0

    @property
    def context(self) -> int:
        """What the context group exchanges."""
        return self.clean + self.corrupted

    @property
    def total(self) -> int:
        """All."""
        return self.context + self.tensor + self.experts

    def __add__(self, other: "LayerTraffic") -> "LayerTraffic":
        return LayerTraffic(
            clean=self.clean + other.clean,
            corrupted=self.corrupted + other.corrupted,
            tensor=self.tensor + other.tensor,
            experts=self.experts + other.experts,
        )


@dataclass(frozen=True, kw_only=True)
class StageTraffic:
    """What a rank of a pipeline stage receives in one iteration.

    Attributes:
        layers: of all layers and micro-batches.
        pipeline: hidden states and their gradients from the neighbouring stages.
        gradients: sums of the weights' gradients.
        weights: weights that the optimizer's ranks hand out.
    """

    layers: LayerTraffic
    pipeline: int
    gradients: int
    weights: int

    @property
    def total(self) -> int:
        """All."""
        return self.layers.total + self.pipeline + self.gradients + self.weights


def exchange_bytes(job: Job, layer: Layer) -> dict[tuple[CopyKind, str], int]:
    """Return what one exchange of an attention layer brings: (copy, `gather` or `reduce`) -> bytes of all heads."""
    plan, per_row = job.plan(layer), job.key_row_bytes
    per_gradient = per_row // job.precision.weights * job.precision.key_gradients
    found: dict[tuple[CopyKind, str], int] = {}
    for copies, transfer in plan.transfers:
        found[copies, "gather"] = transfer.gather_bytes(per_row)
        found[copies, "reduce"] = transfer.reduce_bytes(per_gradient)
    return found


def layer_traffic(job: Job, layer: Layer, recomputed: bool) -> LayerTraffic:
    """Return what a layer receives for one micro-batch, forward and backward.

    Args:
        job: the job.
        layer: the layer.
        recomputed: whether the whole layer runs again in the backward pass. What attention moves does not depend on
            it: the second gather is then that of the repeated forward pass.
    """
    others = {"tensor": _tensor_bytes(job, recomputed), "experts": _expert_bytes(job, layer, recomputed)}
    if not layer.attends:
        sizes = job.network.delta_net_on_rank(job.topology.tensor, job.precision.weights)
        volumes = layer_volumes(
            layer.number, job.rank_rows, sizes, job.micro_batch, training=True, recomputed=recomputed
        )
        by_copy = {
            kind: total(v for entry, v in volumes.items() if entry.copies is kind).remote_bytes for kind in CopyKind
        }
        return LayerTraffic(clean=by_copy[CopyKind.CLEAN], corrupted=by_copy[CopyKind.CORRUPTED], **others)
    moved = exchange_bytes(job, layer)
    by_copy = {kind: 2 * moved.get((kind, "gather"), 0) + moved.get((kind, "reduce"), 0) for kind in CopyKind}
    return LayerTraffic(clean=by_copy[CopyKind.CLEAN], corrupted=by_copy[CopyKind.CORRUPTED], **others)


def hidden_bytes(job: Job, rows: int) -> int:
    """Return the bytes of the hidden states of so many rows of a micro-batch."""
    return rows * job.micro_batch * job.network.hidden * job.precision.weights


def tensor_pass_bytes(job: Job) -> int:
    """Return what tensor parallelism moves in one pass of a layer: two sums of all rows, or their two halves each."""
    size = job.topology.tensor
    return 4 * hidden_bytes(job, job.rows) * (size - 1) // size


def _tensor_bytes(job: Job, recomputed: bool) -> int:
    # With sequence parallelism the backward pass gathers the inputs of both linear pairs once more.
    again = hidden_bytes(job, job.rows) * (job.topology.tensor - 1) // job.topology.tensor
    return tensor_pass_bytes(job) * (3 if recomputed else 2) + 2 * again * job.topology.sequence_parallel


def expert_pass_bytes(job: Job, layer: Layer) -> int:
    """Return what expert parallelism moves in one pass of a layer: rows to their experts, and back."""
    size, experts = job.topology.expert, job.network.experts
    if not layer.has_experts or experts is None or size == 1:
        return 0
    return 2 * hidden_bytes(job, job.shared_rows) * experts.chosen * (size - 1) // size


def _expert_bytes(job: Job, layer: Layer, recomputed: bool) -> int:
    return expert_pass_bytes(job, layer) * (3 if recomputed else 2)


def stage_traffic(job: Job, stage: int) -> StageTraffic:
    """Return what a rank of a pipeline stage receives in one iteration."""
    layers = LayerTraffic()
    for index, layer in job.stage_layers(stage):
        layers += layer_traffic(job, layer, job.recompute.takes_layer(index))
    count = job.micro_batches
    top = job.topology
    neighbours = 2 * top.pipeline * top.virtual - 2 if top.pipeline > 1 else 0  # of all stages, both ways
    own = 0 if top.pipeline == 1 else (1 if top.virtual == 1 and stage in (0, top.pipeline - 1) else 2)
    if top.virtual > 1:
        own = -(-neighbours // top.pipeline)
    return StageTraffic(
        layers=LayerTraffic(
            clean=layers.clean * count,
            corrupted=layers.corrupted * count,
            tensor=layers.tensor * count,
            experts=layers.experts * count,
        ),
        pipeline=own * hidden_bytes(job, job.shared_rows) * count,
        gradients=_over_groups(job, stage, job.precision.gradients) * (1 if job.distributed_optimizer else 2),
        weights=_over_groups(job, stage, job.precision.weights) if job.distributed_optimizer else 0,
    )


def _over_groups(job: Job, stage: int, itemsize: int) -> int:
    """Return the bytes of one all-gather or reduce-scatter of all parameters over their groups."""
    counted, top = job.stage_parameters(stage), job.topology
    groups = ((counted.dense, top.gradient_group), (counted.experts, top.expert_gradient_group))
    return sum(number * itemsize * (size - 1) // size for number, size in groups)
