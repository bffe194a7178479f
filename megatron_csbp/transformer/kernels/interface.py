# SPDX-License-Identifier: Apache-2.0
"""What a tile asks of an attention kernel.

Shapes: G independent problems of one tile (runs times micro-batch), T rows, U keys, N query heads, K key/value heads,
D head dim.
"""

from typing import Protocol

from torch import Tensor


class AttentionKernel(Protocol):
    """A dense or causal attention with its log-sum-exp, and the backward pass that takes merged results.

    Inputs may be any strided views whose last dim is contiguous. N is a multiple of K (grouped-query attention).
    """

    name: str

    def forward(
        self, query_GTND: Tensor, key_GUKD: Tensor, value_GUKD: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return the output [G, T, N, D] in the input dtype and the natural log-sum-exp [G, T, N] in fp32 or fp64."""
        ...

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
        """Return the gradients of query [G, T, N, D], key and value [G, U, K, D], in the input dtype or a wider one.

        `out_GTND` and `lse_GTN` are the results merged over all keys, not this tile's own: the flash backward then
        yields this tile's exact share of the gradients.
        """
        ...
