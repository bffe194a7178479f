# SPDX-License-Identifier: Apache-2.0
"""What a rank keeps of a micro-batch from its forward to its backward pass. Pure.

Bytes of one rank and one micro-batch. Tests hold these formulas against what PyTorch's saved-tensor hooks count.

Letters: S rows on a rank, H hidden size, F width of an MLP, N query heads, K key heads, D head dim, b bytes of an
element, R rows with loss, V vocabulary, of a tensor-parallel rank where it is divided.
"""

from megatron_csbp.tools.dry_run.delta_net_costs import delta_net_saved
from megatron_csbp.tools.dry_run.job import Job
from megatron_csbp.tools.dry_run.network import Layer, LayerKind

_FP32 = 4
_INDEX = 8


def kept_input(job: Job) -> int:
    """Return the bytes of the input of a recomputed layer."""
    shared = job.shared_rows
    if job.recompute.distributes and not job.topology.sequence_parallel:
        shared //= job.topology.tensor
    return shared * job.micro_batch * job.network.hidden * job.precision.weights


def saved_by_mixer(job: Job, layer: Layer) -> int:
    """Return what a layer's attention or delta net saves, with the norm before it, if nothing is recomputed."""
    if layer.kind is LayerKind.DELTA_NET:
        return _norm(job, job.shared_rows) + delta_net_saved(job)
    return _norm(job, job.shared_rows) + _saved_by_attention(job)


def _saved_by_attention(job: Job) -> int:
    network, tensor, b = job.network, job.topology.tensor, job.precision.weights
    queries = network.query_heads * network.head_dim // tensor
    keys = job.local_key_heads * network.head_dim
    heads = queries // network.head_dim
    modules = job.recompute.modules
    per_row = b * (queries + 2 * keys) + b * queries  # queries, keys and values; the output, which is projected
    if "core_attn" in modules:
        per_row += b * (queries + keys)  # values are a view of the whole projection, which stays with them
    else:
        per_row += _FP32 * heads  # log-sum-exp
    if network.qk_norm:
        per_row += _qk_norm(job, queries, keys)
    if network.output_gate:
        per_row += 2 * b * queries  # the gate and what it multiplies
    if not job.layers.fused_rope:
        per_row += 4 * b * network.head_dim  # sines and cosines, for queries and for keys
    return per_row * job.rows * job.micro_batch


def _qk_norm(job: Job, queries: int, keys: int) -> int:
    dim, b = job.network.head_dim, job.precision.weights
    factors = _FP32 * job.network.norm_tensors * (queries + keys) // dim
    if job.layers.fused_norms:
        gate = queries if job.network.output_gate else 0
        return b * (queries + gate + 2 * keys) + factors  # views of the projection, which stays as a whole
    return 2 * _FP32 * (queries + keys) + factors


def saved_by_mlp(job: Job, layer: Layer) -> int:
    """Return what a layer's MLP saves, with the norm before it, if nothing is recomputed."""
    rows = _rows_behind_attention(job, layer)
    network, b, modules = job.network, job.precision.weights, job.recompute.modules
    sizes = network.experts
    dropout = 2 * rows * job.micro_batch * network.hidden if job.dropout else 0
    saved = _norm(job, rows) + dropout
    if not layer.has_experts:
        inner = job.rows * rows // job.shared_rows  # with sequence parallelism the MLP itself sees all rows
        wide = network.ffn // job.topology.tensor
        hidden = b * activated(network.gated) * wide
        return saved + (0 if "mlp" in modules else hidden * inner * job.micro_batch)
    assert sizes is not None
    chosen = rows * job.micro_batch * sizes.chosen
    wide = sizes.ffn // job.topology.expert_tensor
    routed = chosen * (b * network.hidden + b * activated(network.gated) * wide + _FP32 + _INDEX)
    router = rows * job.micro_batch * sizes.number * 3 * _FP32
    shared = rows * job.micro_batch * b * activated(network.gated) * sizes.shared_ffn // job.topology.tensor
    return saved + (0 if "moe" in modules else routed + router + shared)


def activated(gated: bool) -> int:
    """Return how many times the width of an MLP is kept: the input of the activation, and its output."""
    return 3 if gated else 2


def _norm(job: Job, rows: int) -> int:
    """Return what a norm and the input of the linear layer behind it take."""
    hidden, b = job.network.hidden, job.precision.weights
    output = 0 if "layernorm" in job.recompute.modules else b * hidden
    factors = _FP32 * job.network.norm_tensors
    if job.layers.fused_norms or job.network.norm_tensors > 1:  # LayerNorm is one kernel everywhere
        return rows * job.micro_batch * (b * hidden + output + factors)
    return rows * job.micro_batch * (2 * _FP32 * hidden + output + factors)


def _rows_behind_attention(job: Job, layer: Layer) -> int:
    if not job.drops_in(layer):
        return job.shared_rows
    return job.shared_rows * job.rank_rows.num_corrupted_rows // job.rows


def saved_by_layer(job: Job, layer: Layer) -> int:
    """Return what a layer saves that is not recomputed as a whole."""
    return saved_by_mixer(job, layer) + saved_by_mlp(job, layer)
