# SPDX-License-Identifier: Apache-2.0
"""One attention layer without data: what its collectives carry, and how many pairs its tiles really compute."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_csbp.tools.attention_step import CollectiveBytes, attention_step, fake_group
from megatron_csbp.tools.flops import ModelShape
from megatron_csbp.transformer.geometry.layer_plans import layer_plans
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import Scheme, Sharding
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask, allowed_pairs
from megatron_csbp.transformer.kernels.torch_kernel import TorchCpuKernel

SHAPE = ModelShape(
    num_layers=1,
    hidden_size=32,
    ffn_hidden_size=64,
    num_query_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=50,
)


class CountingKernel(TorchCpuKernel):
    """Counts query-key pairs by the shapes that the operators get."""

    def __init__(self) -> None:
        self.pairs = {"forward": 0, "backward": 0}

    def forward(
        self, query_GTND: Tensor, key_GUKD: Tensor, value_GUKD: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        self._count("forward", query_GTND, key_GUKD, causal)
        return super().forward(query_GTND, key_GUKD, value_GUKD, causal=causal, scale=scale)

    def backward(
        self, grad_out_GTND: Tensor, query_GTND: Tensor, key_GUKD: Tensor, *rest: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._count("backward", query_GTND, key_GUKD, causal)
        return super().backward(grad_out_GTND, query_GTND, key_GUKD, *rest, causal=causal, scale=scale)

    def _count(self, name: str, query_GTND: Tensor, key_GUKD: Tensor, causal: bool) -> None:
        problems, rows, heads, _ = query_GTND.shape
        keys = key_GUKD.shape[1]
        assert key_GUKD.shape[0] == problems
        assert not causal or rows == keys
        # Small tiles have their query heads as further rows.
        assert heads == SHAPE.num_query_heads or (not causal and heads == SHAPE.num_key_value_heads)
        pairs = problems * (rows * (rows + 1) // 2 if causal else rows * keys)
        self.pairs[name] += pairs * heads // SHAPE.num_query_heads


@pytest.mark.parametrize("clean_attention", CleanAttention)
@pytest.mark.parametrize("blocks_per_chunk", [4, 7, 16])
def test_kernels_are_given_just_the_pairs_that_the_mask_allows(
    blocks_per_chunk: int, clean_attention: CleanAttention
) -> None:
    for group_size, scheme in product([2, 8], [Scheme.CONTEXT_PARALLEL, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL]):
        sample, mask = Sample(2 * group_size * blocks_per_chunk * 32, 32), Mask(clean_attention)
        executed = {"forward": 0, "backward": 0}
        for rank in range(group_size):
            kernel = CountingKernel()
            with fake_group(group_size, rank) as group:
                plan = layer_plans(sample, Sharding(group_size, scheme), rank).plan(mask)
                attention_step(plan, SHAPE, group, kernel=kernel)()
            executed = {name: pairs + kernel.pairs[name] for name, pairs in executed.items()}
        allowed = allowed_pairs(sample, mask)
        assert executed == {"forward": allowed, "backward": allowed}


def test_bytes_are_those_of_each_operators_buffers() -> None:
    with fake_group(4, 1) as group, CollectiveBytes(4, 1) as collectives:
        dist.all_to_all_single(torch.empty(8), torch.empty(8), group=group)
        dist.all_to_all_single(torch.empty(6), torch.empty(9), [3, 1, 0, 2], [4, 0, 5, 0], group=group)
        shares = [torch.empty(8), torch.empty(2)]
        # Named as the exchange names them for the torch at hand.
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        gather(shares[0], shares[1], group=group)
        gather(shares[0], shares[1], group=group)
        scatter(shares[1], shares[0], group=group)
    assert collectives.remote_bytes == {
        "alltoall_base_": 24 + 5 * 4,
        "_allgather_base_": 48,
        "_reduce_scatter_base_": 24,
    }


def test_the_group_is_gone_afterwards() -> None:
    with fake_group(4, 3) as group:
        assert (dist.get_rank(group), dist.get_world_size(group)) == (3, 4)
    assert not dist.is_initialized()
