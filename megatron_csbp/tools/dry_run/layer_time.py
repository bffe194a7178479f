# SPDX-License-Identifier: Apache-2.0
"""How long a layer and the loss take on one rank, forward and backward. Pure: modelled from rates, not measured."""

from dataclasses import dataclass
from functools import lru_cache

from megatron_csbp.reporting.attention_model import Heads, tile_costs
from megatron_csbp.tools.dry_run import schedule
from megatron_csbp.tools.dry_run.delta_net_costs import delta_net_operations
from megatron_csbp.tools.dry_run.job import Job
from megatron_csbp.tools.dry_run.network import Layer
from megatron_csbp.tools.dry_run.operations import mixer_operations, mlp_operations
from megatron_csbp.tools.dry_run.schedule import NO_TIME, AttentionParts, Span
from megatron_csbp.tools.dry_run.tables import Gpu, Link
from megatron_csbp.tools.dry_run.traffic import exchange_bytes, expert_pass_bytes, tensor_pass_bytes
from megatron_csbp.transformer.delta_net.costs import layer_bytes
from megatron_csbp.transformer.geometry.tiles import KeySource

_TERA = 1e12


@dataclass(frozen=True)
class Machine:
    """A GPU, and the links that the groups of a job use.

    Attributes:
        gpu: the GPU.
        context: link of the context group.
        tensor: of tensor parallelism.
        expert: of expert parallelism.
        wide: of data- and pipeline-parallel groups, which span the job.
    """

    gpu: Gpu
    context: Link
    tensor: Link
    expert: Link
    wide: Link


@dataclass(frozen=True, kw_only=True)
class PassTime:
    """One pass of one layer for one micro-batch.

    Attributes:
        linear: matrix products.
        attention: tiles, their merges, and waits for the exchange.
        states: the recurrence of a gated delta net, and waits for its exchange.
        pointwise: norms, rotary embedding, activations, residuals.
        tensor: sums of tensor parallelism, which nothing hides.
        experts: exchanges of expert parallelism, which nothing hides.
    """

    linear: float = 0.0
    attention: Span = NO_TIME
    states: Span = NO_TIME
    pointwise: float = 0.0
    tensor: float = 0.0
    experts: float = 0.0

    @property
    def seconds(self) -> float:
        """All, one after the other."""
        return self.linear + self.attention.seconds + self.states.seconds + self.pointwise + self.tensor + self.experts


def forward_time(job: Job, layer: Layer, machine: Machine) -> PassTime:
    """Return the forward pass of a layer."""
    attention = schedule.forward(_parts(job, layer, machine, backward=False)) if layer.attends else Span()
    return _pass(job, layer, machine, attention, 1)


def backward_time(job: Job, layer: Layer, machine: Machine, recomputed: bool) -> PassTime:
    """Return the backward pass of a layer without the forward pass that may be repeated before it."""
    attention = Span()
    if layer.attends:
        at_hand = recomputed or "core_attn" in job.recompute.modules
        attention = schedule.backward(_parts(job, layer, machine, backward=True), keys_at_hand=at_hand)
    return _pass(job, layer, machine, attention, 2)


def repeated_time(job: Job, layer: Layer, machine: Machine, recomputed: bool) -> PassTime:
    """Return what is computed again before a layer's backward pass."""
    if recomputed:
        return forward_time(job, layer, machine)
    again, modules = forward_time(job, layer, machine), job.recompute.modules
    mlp = mlp_operations(job, layer) if {"mlp", "moe"} & modules else 0
    return PassTime(
        linear=mlp / (machine.gpu.matmul_tflops * _TERA),
        attention=again.attention if "core_attn" in modules else Span(),
        experts=again.experts if "moe" in modules else 0.0,
    )


def _pass(job: Job, layer: Layer, machine: Machine, attention: Span, products: int) -> PassTime:
    linear = (mixer_operations(job, layer) + mlp_operations(job, layer)) / (machine.gpu.matmul_tflops * _TERA)
    collectives = 4 if job.topology.sequence_parallel else 2
    return PassTime(
        linear=products * linear,
        attention=attention,
        states=_states(job, layer, machine, products),
        pointwise=products * pointwise_bytes(job, layer) / (machine.gpu.memory_tbytes * _TERA),
        tensor=machine.tensor.seconds(tensor_pass_bytes(job), collectives),
        experts=machine.expert.seconds(expert_pass_bytes(job, layer), 2),
    )


def _states(job: Job, layer: Layer, machine: Machine, products: int) -> Span:
    """Return the recurrence of a gated delta net, whose exchange nothing hides."""
    if layer.attends:
        return Span()
    sizes = job.network.delta_net_on_rank(job.topology.tensor, job.precision.weights)
    moved = layer_bytes(job.rank_rows, sizes, job.micro_batch)
    waits = machine.context.seconds(moved.forward if products == 1 else moved.backward, 2)
    computed = products * delta_net_operations(job) / (machine.gpu.delta_net_tflops * _TERA)
    return Span(computed + waits, waits)


def pointwise_bytes(job: Job, layer: Layer) -> int:
    """Return what a forward pass reads and writes outside matrix products and attention; a backward pass, twice that.

    Two norms and two residual sums read and write all hidden states, the rotary embedding queries and keys, and the
    activation reads two widths of the MLP and writes one.
    """
    network, tensor, b = job.network, job.topology.tensor, job.precision.weights
    hidden = 10 * job.shared_rows * network.hidden
    turned = 2 * (network.query_heads + network.key_heads) * network.head_dim // tensor if layer.attends else 0
    wide = network.ffn
    if layer.has_experts and network.experts is not None:
        wide = network.experts.ffn * network.experts.chosen + network.experts.shared_ffn
    inner = (3 if network.gated else 2) * wide // tensor
    return b * job.micro_batch * (hidden + job.rows * (turned + inner))


def _parts(job: Job, layer: Layer, machine: Machine, *, backward: bool) -> AttentionParts:
    plan = job.plan(layer)
    groups = job.exchange_groups if plan.exchanges else 0
    local, gathered, beside = _tile_seconds(job, layer, machine, max(1, groups), backward)
    moved = exchange_bytes(job, layer)
    count = max(1, groups)
    gather = sum(size for (_, what), size in moved.items() if what == "gather") / count
    reduce = sum(size for (_, what), size in moved.items() if what == "reduce") / count
    starts = len(plan.transfers)
    return AttentionParts(
        local=local,
        gathered=gathered / count,
        gather=machine.context.seconds(gather, starts),
        reduce=machine.context.seconds(reduce, starts) if backward else 0.0,
        beside_reduces=beside,
        groups=groups,
    )


def _tile_seconds(job: Job, layer: Layer, machine: Machine, groups: int, backward: bool) -> tuple[float, float, float]:
    """Return the seconds of local tiles, gathered tiles, and the local tiles that wait for the sums of gradients."""
    plan, tensor = job.plan(layer), job.topology.tensor
    heads = Heads(
        num_query_heads=job.network.query_heads // tensor,
        num_key_value_heads=job.local_key_heads,
        head_dim=job.network.head_dim,
    )
    late = set(map(id, plan.backward_local_tiles[1]))
    local = gathered = beside = 0.0
    for cost in tile_costs(plan, heads, groups, machine.gpu.attention_rates):
        seconds = job.micro_batch * (cost.backward if backward else cost.forward).seconds
        if cost.tile.key_source is KeySource.GATHERED:
            gathered += seconds
        elif backward and groups and id(cost.tile) in late:
            beside += seconds
        else:
            local += seconds
    return local, gathered, beside


@lru_cache(maxsize=64)
def loss_time(job: Job, machine: Machine) -> float:
    """Return what the loss takes for one micro-batch, forward and backward: logits, and passes over them in fp32.

    Logits of chunks are computed twice.
    """
    rows = job.loss_rows * job.micro_batch / job.topology.context
    vocab = job.network.vocab // job.topology.tensor
    products = 4 if job.loss_chunk and rows > job.loss_chunk else 3
    operations = 2 * products * rows * job.network.hidden * vocab
    passes = 2 * products * rows * vocab * (4 + job.precision.weights)
    return operations / (machine.gpu.matmul_tflops * _TERA) + passes / (machine.gpu.memory_tbytes * _TERA)
