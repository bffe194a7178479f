# SPDX-License-Identifier: Apache-2.0
"""FlexAttention for the local tiles, all in one call, and another backend for those whose keys are gathered.

The local tiles are many and small: their launches and merges take longer than their arithmetic in short sequences. The
gathered ones are few and large, and a library's kernels are fastest there.

Shapes: S local rows, B micro-batch, N query heads, K key/value heads, D head dim; G problems of
one tile, T rows, U keys.
"""

from torch import Tensor

from megatron_csbp.transformer.geometry.plan import AttentionPlan
from megatron_csbp.transformer.kernels.interface import AttentionKernel
from megatron_csbp.transformer.kernels.local_interface import LocalKernel


class HybridKernel:
    """A `LocalKernel` by one backend, and an `AttentionKernel` by another.

    Args:
        local: computes the local tiles.
        gathered: computes the others.
    """

    name = "hybrid"

    def __init__(self, local: LocalKernel, gathered: AttentionKernel) -> None:
        self.local = local
        self.gathered = gathered

    def forward(
        self, query_GTND: Tensor, key_GUKD: Tensor, value_GUKD: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionKernel.forward`."""
        return self.gathered.forward(query_GTND, key_GUKD, value_GUKD, causal=causal, scale=scale)

    def backward(
        self,
        grad_out_GTND: Tensor,
        query_GTND: Tensor,
        key_GUKD: Tensor,
        value_GUKD: Tensor,
        out_GTND: Tensor,
        lse_GTN: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `AttentionKernel.backward`."""
        tensors = (grad_out_GTND, query_GTND, key_GUKD, value_GUKD, out_GTND, lse_GTN)
        return self.gathered.backward(*tensors, causal=causal, scale=scale)

    def forward_local(
        self, query_SBND: Tensor, key_SBKD: Tensor, value_SBKD: Tensor, *, plan: AttentionPlan, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `LocalKernel.forward_local`."""
        return self.local.forward_local(query_SBND, key_SBKD, value_SBKD, plan=plan, scale=scale)

    def backward_local(
        self,
        grad_out_SBND: Tensor,
        query_SBND: Tensor,
        key_SBKD: Tensor,
        value_SBKD: Tensor,
        out_SBND: Tensor,
        lse_SBN: Tensor,
        *,
        plan: AttentionPlan,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `LocalKernel.backward_local`."""
        tensors = (grad_out_SBND, query_SBND, key_SBKD, value_SBKD, out_SBND, lse_SBN)
        return self.local.backward_local(*tensors, plan=plan, scale=scale)
