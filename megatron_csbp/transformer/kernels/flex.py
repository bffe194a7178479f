# SPDX-License-Identifier: Apache-2.0
"""All local tiles of a plan as one compiled FlexAttention call; gathered tiles by PyTorch's CUDA operators.

Shapes: S local rows, B micro-batch, N query heads, K key/value heads, D head dim.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from megatron_csbp.transformer.geometry.plan import AttentionPlan
from megatron_csbp.transformer.kernels.flex_mask import local_block_mask
from megatron_csbp.transformer.kernels.torch_cuda import TorchCudaKernel

_MOST_COMPILATIONS = 64
"""Shapes in one process. PyTorch gives up after eight, and a check of several group sizes and lengths has more."""


@cache
def compiled_flex_attention() -> Callable[..., Any]:
    """Return FlexAttention, to be compiled once for each shape; without compilation it would build S x S scores."""
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def attend(*tensors: Tensor, **options: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=_MOST_COMPILATIONS):
            return compiled(*tensors, **options)

    return attend


class FlexKernel(TorchCudaKernel):
    """A `LocalKernel`, and an `AttentionKernel` for the tiles whose keys are gathered."""

    name = "flex"

    def forward_local(
        self, query_SBND: Tensor, key_SBKD: Tensor, value_SBKD: Tensor, *, plan: AttentionPlan, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `LocalKernel.forward_local`."""
        # As backward does it, gradients and all, or else it would be compiled twice.
        _, out_SBND, lse_SBN = _attend(query_SBND, key_SBKD, value_SBKD, plan, scale)
        return out_SBND.detach(), lse_SBN.detach()

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
        """See `LocalKernel.backward_local`.

        FlexAttention's public backward knows only its own output and log-sum-exp, not merged ones, but it takes
        gradients of both. The merged output is w x local output + (1 - w) x the rest with w = exp(local lse - lse), so
        they are w x grad_out and w x <grad_out, local output - out>; with them its backward yields exactly the local
        share. The local forward is computed again for it rather than kept: it is 1/(2P) of the layer's.
        """
        inputs, local_out_SBND, local_lse_SBN = _attend(query_SBND, key_SBKD, value_SBKD, plan, scale)
        weight_SBN = torch.exp(local_lse_SBN.detach() - lse_SBN.to(local_lse_SBN.dtype))
        weight_SBN.masked_fill_(lse_SBN == -torch.inf, 0.0)  # a row that sees nothing has no difference: NaN
        difference_SBND = local_out_SBND.detach().to(weight_SBN.dtype) - out_SBND
        grad_local_lse_SBN = weight_SBN * (grad_out_SBND * difference_SBND).sum(-1)
        grad_local_out_SBND = (weight_SBN.unsqueeze(-1) * grad_out_SBND).to(local_out_SBND.dtype)
        grad_query, grad_key, grad_value = torch.autograd.grad(
            (local_out_SBND, local_lse_SBN), inputs, (grad_local_out_SBND, grad_local_lse_SBN)
        )
        return grad_query, grad_key, grad_value


def _attend(
    query_SBND: Tensor, key_SBKD: Tensor, value_SBKD: Tensor, plan: AttentionPlan, scale: float
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return inputs that need a gradient, and output [S, B, N, D] and log-sum-exp [S, B, N] as functions of them."""
    block_mask = local_block_mask(plan, query_SBND.device)
    with torch.enable_grad():
        inputs = [tensor.detach().requires_grad_() for tensor in (query_SBND, key_SBKD, value_SBKD)]
        out_BNSD, aux = compiled_flex_attention()(
            *(tensor.permute(1, 2, 0, 3) for tensor in inputs),
            block_mask=block_mask,
            scale=scale,
            enable_gqa=query_SBND.shape[2] != key_SBKD.shape[2],
            return_aux=AuxRequest(lse=True),
        )
        return inputs, out_BNSD.permute(2, 0, 1, 3), aux.lse.permute(2, 0, 1)
