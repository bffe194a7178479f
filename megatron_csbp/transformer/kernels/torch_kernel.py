# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own flash attention operators that return the log-sum-exp.

Shapes: G independent problems of one tile, T rows, U keys, N query heads, K key/value heads, D head dim.
"""

import torch
from torch import Tensor

_aten = torch.ops.aten


class TorchCpuKernel:
    """PyTorch's CPU flash attention: fp32, bf16 and fp64, grouped-query heads without copies.

    The operator's own layout is [G, N, T, D] over memory in [G, T, N, D] order, so every transpose here is a view.
    """

    name = "torch"

    def forward(
        self, query_GTND: Tensor, key_GUKD: Tensor, value_GUKD: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionKernel.forward`."""
        out_GNTD, lse_GNT = _aten._scaled_dot_product_flash_attention_for_cpu(
            query_GTND.transpose(1, 2), key_GUKD.transpose(1, 2), value_GUKD.transpose(1, 2), 0.0, causal, scale=scale
        )
        return out_GNTD.transpose(1, 2), lse_GNT.transpose(1, 2)

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
        """See `AttentionKernel.backward`.

        Half-precision inputs give fp32 gradients: a key's gradient is the sum of many tiles' shares, and rounding each
        share to bf16 would make the sum less accurate than one dense bf16 computation.
        """
        dtype = torch.promote_types(query_GTND.dtype, torch.float32)
        inputs = (grad_out_GTND, query_GTND, key_GUKD, value_GUKD, out_GTND, lse_GTN)
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(tensor.transpose(1, 2).to(dtype) for tensor in inputs), 0.0, causal, scale=scale
        )
        grad_query_GTND, grad_key_GUKD, grad_value_GUKD = (grad.transpose(1, 2) for grad in grads)
        return grad_query_GTND, grad_key_GUKD, grad_value_GUKD
