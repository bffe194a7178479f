# SPDX-License-Identifier: Apache-2.0
"""What a rank keeps of a micro-batch from its forward to its backward pass, and what a layer needs beside. Pure.

Bytes of one rank and one micro-batch. Tests hold these formulas against what PyTorch's saved-tensor hooks count.

Letters: S rows on a rank, H hidden size, F width of an MLP, N query heads, K key heads, D head dim, b bytes of an
element, R rows with loss, V vocabulary, of a tensor-parallel rank where it is divided.
"""

from megatron_csbp.tools.dry_run.delta_net_costs import delta_net_saved, delta_net_workspace
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
    if "core_attn" not in modules:
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
    return (2 * _FP32 if b < _FP32 else _FP32) * (queries + keys) + factors


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
        hidden = b * _activated(network.gated) * wide
        return saved + (0 if "mlp" in modules else hidden * inner * job.micro_batch)
    assert sizes is not None
    chosen = rows * job.micro_batch * sizes.chosen
    wide = sizes.ffn // job.topology.expert_tensor
    routed = chosen * (b * network.hidden + b * _activated(network.gated) * wide + _FP32 + _INDEX)
    combined = chosen * b * network.hidden  # what the experts return, weighted
    router = rows * job.micro_batch * sizes.number * 3 * _FP32
    shared = rows * job.micro_batch * b * _activated(network.gated) * sizes.shared_ffn // job.topology.tensor
    return saved + (0 if "moe" in modules else routed + combined + router + shared)


def _activated(gated: bool) -> int:
    """Return how many times the width of an MLP is kept: the input of the activation, and its output."""
    return 3 if gated else 2


def _norm(job: Job, rows: int) -> int:
    """Return what a norm and the input of the linear layer behind it take."""
    hidden, b = job.network.hidden, job.precision.weights
    output = 0 if "layernorm" in job.recompute.modules else b * hidden
    factors = _FP32 * job.network.norm_tensors
    if job.layers.fused_norms or job.network.norm_tensors > 1:  # LayerNorm is one kernel everywhere
        return rows * job.micro_batch * (b * hidden + output + factors)
    own = 2 * _FP32 * hidden if b < _FP32 else _FP32 * hidden
    return rows * job.micro_batch * (own + output + factors)


def _rows_behind_attention(job: Job, layer: Layer) -> int:
    if not job.drops_in(layer):
        return job.shared_rows
    return job.shared_rows * job.rank_rows.num_corrupted_rows // job.rows


def saved_by_layer(job: Job, layer: Layer) -> int:
    """Return what a layer saves that is not recomputed as a whole."""
    return saved_by_mixer(job, layer) + saved_by_mlp(job, layer)


def gather_buffers(job: Job, layer: Layer) -> int:
    """Return what an attention layer holds of other ranks' keys, and of gradients for them, at its fullest."""
    if not layer.attends:
        return 0
    plan, groups = job.plan(layer), job.exchange_groups
    if not plan.exchanges:
        return 0
    b = job.precision.weights
    elements = sum(transfer.num_rows for _, transfer in plan.transfers) * job.key_row_bytes // b
    gathered = plan.clean.buffer_bytes(job.key_row_bytes)
    if not job.recompute.attention:
        gathered = gathered * min(2, groups) // groups
    payload = job.precision.key_gradients if job.precision.key_gradients < _FP32 else 0
    return gathered + elements // groups * (_FP32 + payload)


def mixer_workspace(job: Job, layer: Layer) -> int:
    """Return what the backward pass of attention or a delta net allocates at its fullest besides gather buffers.

    Attention: gradients of queries, keys and values in fp32; that of the output; and the largest tile's gradients.
    """
    if not layer.attends:
        return delta_net_workspace(job)
    network, b = job.network, job.precision.weights
    queries = network.query_heads * network.head_dim // job.topology.tensor
    keys = job.local_key_heads * network.head_dim
    rows = job.rows * job.micro_batch
    accumulated = max(b, _FP32) * (queries + 2 * keys)
    # The largest tile has half of the rows; the last step converts the sums one after the other.
    partial = b * (queries // 2 + 2 * keys)
    return rows * (accumulated + b * queries + max(partial, b * queries))


def mlp_workspace(job: Job, layer: Layer) -> int:
    """Return what an MLP's backward pass allocates at its fullest: gradients of its inner and of its outer rows."""
    network, b = job.network, job.precision.weights
    wide = network.ffn // job.topology.tensor
    rows = job.rows * job.micro_batch
    if layer.has_experts:
        assert network.experts is not None
        wide = network.experts.ffn // job.topology.expert_tensor
        rows = job.shared_rows * job.micro_batch * network.experts.chosen
    return b * rows * (_activated(network.gated) * wide + 2 * network.hidden)


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
