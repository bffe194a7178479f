# SPDX-License-Identifier: Apache-2.0
"""What the layer at work, or the loss, allocates in a backward pass besides what was kept for it. Pure.

Bytes of one rank and one micro-batch. Tests hold attention against an allocation meter on meta tensors.

Letters: N query heads, K key heads, D head dim, b bytes of an element.
"""

from dataclasses import dataclass

from megatron_csbp.reporting.attention_model import Heads, tile_workspace
from megatron_csbp.tools.dry_run.activations import activated
from megatron_csbp.tools.dry_run.delta_net_costs import delta_net_workspace
from megatron_csbp.tools.dry_run.job import Job
from megatron_csbp.tools.dry_run.network import Layer
from megatron_csbp.transformer.geometry.tiles import KeySource, Tile

_BF16, _FP32 = 2, 4


@dataclass(frozen=True)
class MixerMemory:
    """The fullest moment of a backward pass of attention or of a delta net.

    Attributes:
        buffers: keys of other ranks, and gradients for them.
        workspace: sums of gradients, and what a tile allocates.
    """

    buffers: int
    workspace: int

    @property
    def total(self) -> int:
        """Both."""
        return self.buffers + self.workspace


def mixer_memory(job: Job, layer: Layer) -> MixerMemory:
    """Return the fullest moment of a layer's attention or delta net."""
    if not layer.attends:
        return MixerMemory(0, delta_net_workspace(job))
    network, b = job.network, job.precision.weights
    rows = job.rows * job.micro_batch
    queries = rows * network.query_heads * network.head_dim // job.topology.tensor
    keys = rows * job.local_key_heads * network.head_dim
    sums = max(b, _FP32) * (queries + 2 * keys) + b * queries  # of gradients; and the gradient of the output
    moments = [MixerMemory(0, b * (queries + 2 * keys))]  # the end: sums become gradients in the dtype of the rows
    plan = job.plan(layer)
    late = plan.backward_local_tiles[1]
    if not plan.exchanges:
        moments.append(MixerMemory(0, _most(job, plan.tiles)))
    else:
        moments += _exchange_moments(job, layer, _most(job, plan.backward_local_tiles[0]), _most(job, late))
    fullest = max(moments, key=lambda moment: moment.total)
    return MixerMemory(fullest.buffers, fullest.workspace + sums)


def _exchange_moments(job: Job, layer: Layer, early: int, late: int) -> list[MixerMemory]:
    """Return the moments of a layer with an exchange: local tiles, gathered tiles, and sums of gradients under way."""
    plan, groups = job.plan(layer), job.exchange_groups
    gathered = sum(transfer.buffer_bytes(job.key_row_bytes) for _, transfer in plan.transfers)
    per_group = gathered // groups
    clean = plan.clean.buffer_bytes(job.key_row_bytes) // groups // job.precision.weights
    elements = per_group // job.precision.weights
    kept = gathered if job.recompute.attention else per_group  # the repeated forward pass leaves all groups' keys
    ahead = 0 if job.recompute.attention or groups == 1 else per_group
    payload = job.precision.key_gradients if job.precision.key_gradients < _FP32 else 0
    behind = kept - per_group if job.recompute.attention else ahead
    tile = _most(job, plan.gathered_tiles, groups)
    return [
        MixerMemory(kept, early),
        MixerMemory(kept + ahead + clean * _FP32, tile),
        MixerMemory(behind + elements * (_FP32 + payload), late),
    ]


def _most(job: Job, tiles: tuple[Tile, ...], groups: int = 1) -> int:
    """Return what the tile allocates that allocates most."""
    heads = Heads(
        num_query_heads=job.network.query_heads // job.topology.tensor,
        num_key_value_heads=job.local_key_heads,
        head_dim=job.network.head_dim,
    )
    sizes = [tile_workspace(tile, heads, groups if tile.key_source is KeySource.GATHERED else 1) for tile in tiles]
    return max(sizes, default=0) * job.micro_batch * job.precision.weights // _BF16


def mlp_workspace(job: Job, layer: Layer) -> int:
    """Return what an MLP's backward pass allocates at its fullest: gradients of its inner and of its outer rows."""
    network, b = job.network, job.precision.weights
    wide = network.ffn // job.topology.tensor
    rows = job.rows * job.micro_batch
    if layer.has_experts:
        assert network.experts is not None
        wide = network.experts.ffn // job.topology.expert_tensor
        rows = job.shared_rows * job.micro_batch * network.experts.chosen
    return b * rows * (activated(network.gated) * wide + 2 * network.hidden)


def logits_bytes(job: Job) -> int:
    """Return the logits of a chunk of rows with all that their loss makes of them, at its fullest."""
    rows = job.most_loss_rows * job.micro_batch // job.topology.context
    chunk = min(rows, job.loss_chunk) if job.loss_chunk else rows
    b = job.precision.weights
    # In the backward pass: the logits, their fp32 copy that becomes the softmax and its gradient, and that in the
    # dtype of the logits; a copy of the logits without the mask token.
    copies = _FP32 + 2 * b + b * job.excludes_mask if b < _FP32 else 2 * _FP32 + _FP32 * job.excludes_mask
    return chunk * (job.network.vocab // job.topology.tensor) * copies


def loss_rows_bytes(job: Job) -> int:
    """Return the hidden states of the rows with loss, and their gradient."""
    rows = job.most_loss_rows * job.micro_batch // job.topology.context
    return 2 * rows * job.network.hidden * job.precision.weights
