# SPDX-License-Identifier: Apache-2.0
"""What a kernel offers that computes all local tiles of a plan in one call.

Shapes: S local rows, B micro-batch, N query heads, K key/value heads, D head dim.
"""

from typing import Protocol, runtime_checkable

from torch import Tensor

from megatron_csbp.transformer.geometry.plan import AttentionPlan


@runtime_checkable
class LocalKernel(Protocol):
    """Computes `plan.local_tiles` at once, in place of one `AttentionKernel` call for each tile.

    Every row has at least one local key, so the results are the first of every row; results over gathered keys are
    merged into them.
    """

    name: str

    def forward_local(
        self, query_SBND: Tensor, key_SBKD: Tensor, value_SBKD: Tensor, *, plan: AttentionPlan, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return the output [S, B, N, D] in the input dtype and the natural log-sum-exp [S, B, N] in fp32 or fp64."""
        ...

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
        """Return the local tiles' share of the gradients of query, key and value; `out` and `lse` are merged ones."""
        ...
