# SPDX-License-Identifier: Apache-2.0
"""What attention keeps from forward to backward, and the largest thing that it ever allocates."""

import resource

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_csbp.tools.attention_step import attention_step, fake_group
from megatron_csbp.tools.flops import ModelShape
from megatron_csbp.tools.memory_meter import AllocationMeter, SavedActivations
from megatron_csbp.transformer.attention import AttentionContext, block_diffusion_attention
from megatron_csbp.transformer.communication import ContextGroupExchange
from megatron_csbp.transformer.geometry.plan import AttentionPlan, plan_attention
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import Scheme, Sharding
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask
from megatron_csbp.transformer.kernels.torch_kernel import TorchCpuKernel

CP, BP, CSBP = Scheme.CONTEXT_PARALLEL, Scheme.BLOCK_PARALLEL, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL
SHAPE = ModelShape(
    num_layers=1,
    hidden_size=8,
    ffn_hidden_size=8,
    num_query_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    vocab_size=8,
)
GROUP_SIZE = 16


def plan_of(scheme: Scheme, length: int, group_size: int = GROUP_SIZE, window: int | None = None) -> AttentionPlan:
    rows = RankRows(Sample(length, 32), Sharding(group_size, scheme), group_size - 1)
    return plan_attention(rows, Mask(CleanAttention.TOKEN_CAUSAL, window))


def saved_bytes(scheme: Scheme, length: int) -> int:
    """Return what one layer saves on one rank, in fp32."""
    plan = plan_of(scheme, length)
    with fake_group(GROUP_SIZE, plan.rows.rank) as group, SavedActivations() as saved:
        attention_step(plan, SHAPE, group, dtype=torch.float32)()
    return saved.total_bytes


@pytest.mark.parametrize("length", [2**15, 2**18])
def test_a_layer_saves_its_own_rows_only(length: int) -> None:
    """Query, output, keys, values and log-sum-exp: CSBP as much as CP, and pure BP the whole clean copy with it."""
    per_row = 4 * (2 * 2 * 4 + 2 * 1 * 4 + 2)
    assert saved_bytes(CSBP, length) == saved_bytes(CP, length) == 2 * length // GROUP_SIZE * per_row
    assert saved_bytes(BP, length) == (length + length // GROUP_SIZE) * per_row


@pytest.mark.parametrize("recompute", [False, True])
def test_no_buffer_of_all_keys_outlives_its_layer(recompute: bool) -> None:
    plan = plan_of(CSBP, 2**15)
    buffer_elements = plan.rows.sample.length * SHAPE.num_key_value_heads * SHAPE.head_dim
    with fake_group(GROUP_SIZE, plan.rows.rank) as group:
        context = AttentionContext(plan, TorchCpuKernel(), 1.0, ContextGroupExchange(group))

        def layer(*tensors: torch.Tensor) -> torch.Tensor:
            return block_diffusion_attention(*tensors, context)

        query, key, value = (
            torch.zeros(plan.rows.num_rows, 1, 1, SHAPE.head_dim, device="meta", requires_grad=True) for _ in range(3)
        )
        with AllocationMeter() as meter:
            for _ in range(2):
                query = (
                    checkpoint(layer, query, key, value, use_reentrant=True) if recompute else layer(query, key, value)
                )
                # Between layers there are a rank's own rows: 2 / GROUP_SIZE of the positions, in fp32.
                assert max(meter.live.values()) == 4 * buffer_elements * 2 // GROUP_SIZE
            query.sum().backward()
    assert meter.largest_elements == buffer_elements, "the meter has seen the gather"


@pytest.mark.parametrize("scheme", [CP, BP, CSBP])
def test_nothing_of_size_l_by_l_is_ever_allocated(scheme: Scheme) -> None:
    length, group_size = 2**15, 128
    plan = plan_of(scheme, length, group_size)
    device = "meta" if scheme is BP else "cpu"  # with the whole clean copy on every rank there is too much to compute
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with fake_group(group_size, plan.rows.rank) as group, AllocationMeter() as meter:
        attention_step(plan, SHAPE, group, device=device, dtype=torch.float32)()
    # The largest thing is linear in L: the rows of the widest tensor.
    assert meter.largest_elements <= 2 * length * SHAPE.num_query_heads * SHAPE.head_dim < length * length // 1000
    # What kernels allocate inside shows in the process: L x L bytes would be a gibibyte.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19, "kibibytes"
