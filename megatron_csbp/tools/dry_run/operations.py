# SPDX-License-Identifier: Apache-2.0
"""Operations of a training step: multiplications and additions of matrix products. Pure.

*Useful* operations are those of the model whatever the scheme, in Megatron's convention (see `tools.flops`): three
times the forward pass. What a rank executes is more: recomputation, the scores that a flash backward pass computes
again, the logits of chunks, and in pure BP the clean copy on every rank.
"""

from dataclasses import dataclass
from functools import lru_cache

from megatron_csbp.tools.dry_run.job import Job
from megatron_csbp.tools.dry_run.network import Layer, LayerKind
from megatron_csbp.transformer.delta_net.costs import layer_flops
from megatron_csbp.transformer.geometry.layer_plans import rank_rows
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import Sharding
from megatron_csbp.transformer.geometry.visibility import Mask, allowed_pairs


@dataclass(frozen=True, kw_only=True)
class Operations:
    """Useful operations of one sample.

    Attributes:
        linear: of the layers' linear parts.
        attention: of the query-key pairs that the masks allow.
        states: of the recurrences of gated delta nets.
        logits: of the rows with loss.
    """

    linear: int
    attention: int
    states: int
    logits: int

    @property
    def total(self) -> int:
        """All."""
        return self.linear + self.attention + self.states + self.logits


def mixer_weights(job: Job, layer: Layer) -> int:
    """Return the matrix elements that a row meets in a layer's attention or delta net, all tensor-parallel ranks."""
    network = job.network
    if layer.kind is LayerKind.DELTA_NET:
        sizes = network.delta_net
        assert sizes is not None
        return network.hidden * (sizes.features + sizes.value_heads * sizes.value_dim)
    queries, keys = network.query_heads * network.head_dim, network.key_heads * network.head_dim
    return network.hidden * ((3 if network.output_gate else 2) * queries + 2 * keys)


def mlp_weights(job: Job, layer: Layer) -> int:
    """Return the matrix elements that a row meets in a layer's MLP: of experts, the chosen ones."""
    network = job.network
    if not layer.has_experts:
        return network.mlp_matrices(network.ffn)
    experts = network.experts
    assert experts is not None
    routed = experts.chosen * network.mlp_matrices(experts.ffn) + network.hidden * experts.number
    return routed + network.mlp_matrices(experts.shared_ffn)


def mixer_operations(job: Job, layer: Layer) -> int:
    """Return what the projections of a layer's attention or delta net execute in a forward pass on one rank."""
    projection = _output_weights(job, layer)
    inner = mixer_weights(job, layer) - projection
    met = job.rows * inner + _rows_behind(job, layer) * projection
    return 2 * job.micro_batch * met // job.topology.tensor


def mlp_operations(job: Job, layer: Layer) -> int:
    """Return what a layer's MLP executes in a forward pass on one rank, if rows go to experts evenly."""
    met = _rows_behind(job, layer) * mlp_weights(job, layer)
    return 2 * job.micro_batch * met // job.topology.tensor


def _output_weights(job: Job, layer: Layer) -> int:
    sizes = job.network.delta_net
    if layer.kind is LayerKind.DELTA_NET and sizes is not None:
        return job.network.hidden * sizes.value_heads * sizes.value_dim
    return job.network.hidden * job.network.query_heads * job.network.head_dim


def _rows_behind(job: Job, layer: Layer) -> int:
    """Return the rows that go beyond a layer's keys and values."""
    return job.rank_rows.num_corrupted_rows if job.drops_in(layer) else job.rows


def layer_weights(job: Job, layer: Layer) -> int:
    """Return the matrix elements that a row meets in a layer."""
    return mixer_weights(job, layer) + mlp_weights(job, layer)


def useful_operations(job: Job) -> Operations:
    """Return the useful operations of one sample."""
    network = job.network
    rows = rank_rows(job.sample, Sharding(), 0).num_rows
    attended = sum(_pairs(job.sample, job.mask(layer)) for layer in network.layers if layer.attends)
    return Operations(
        linear=6 * rows * sum(layer_weights(job, layer) for layer in network.layers),
        attention=12 * network.query_heads * network.head_dim * attended,
        states=3 * sum(not layer.attends for layer in network.layers) * _states(job),
        logits=6 * job.loss_rows * network.hidden * network.vocab,
    )


def _states(job: Job) -> int:
    """Return what one gated delta net computes of a sample besides its projections, on one rank with all rows."""
    if job.network.delta_net is None:
        return 0
    rows = rank_rows(job.sample, Sharding(keeps_blocks_home=True), 0)
    flops = layer_flops(rows, job.network.delta_net, job.network.hidden)
    return flops.convolution + flops.rule + flops.solves


@lru_cache(maxsize=16)
def _pairs(sample: Sample, mask: Mask) -> int:
    """Return the pairs that a mask allows in a sample: the same for all layers of a kind."""
    return allowed_pairs(sample, mask)
