# SPDX-License-Identifier: Apache-2.0
"""What a gated delta net layer keeps and computes: the planner's one place for layers of this kind. Pure.

Letters: X channels of the convolution, H value heads, V value dim, b bytes of an element.
"""

from megatron_csbp.tools.dry_run.job import Job
from megatron_csbp.transformer.delta_net.costs import layer_flops, state_memory
from megatron_csbp.transformer.delta_net.traffic import DeltaNetSizes

_FP32 = 4


def delta_net_saved(job: Job) -> int:
    """Return the bytes that a layer saves for its backward pass, the norm before it apart.

    The projected features; queries, keys and values behind the convolution, with what normalises queries and keys;
    decay and write strength; the output of the rule, its norm and what the gate makes of it; and states.
    """
    sizes, b = _sizes(job), job.precision.weights
    values = sizes.value_heads * sizes.value_dim
    per_row = b * (sizes.features + 2 * sizes.channels + 3 * values) + 4 * _FP32 * sizes.value_heads
    return job.rows * job.micro_batch * per_row + _states(job)


def _states(job: Job) -> int:
    return state_memory(job.rank_rows, _sizes(job), job.state_bytes, job.micro_batch, job.delta_net_kernel).kept_bytes


def delta_net_workspace(job: Job) -> int:
    """Return what a backward pass allocates at its fullest: the states of a segment, and the rows' gradients."""
    sizes, b = _sizes(job), job.precision.weights
    memory = state_memory(job.rank_rows, sizes, job.state_bytes, job.micro_batch, job.delta_net_kernel)
    values = sizes.value_heads * sizes.value_dim
    rows = job.rows * job.micro_batch
    return 2 * memory.alive_bytes + rows * (b * (sizes.features + values) + _FP32 * sizes.channels)


def delta_net_operations(job: Job) -> int:
    """Return the operations of a forward pass on a rank, its projections apart."""
    flops = layer_flops(job.rank_rows, _sizes(job), job.network.hidden, job.micro_batch)
    return flops.total - flops.projections


def _sizes(job: Job) -> DeltaNetSizes:
    return job.network.delta_net_on_rank(job.topology.tensor, job.precision.weights)
