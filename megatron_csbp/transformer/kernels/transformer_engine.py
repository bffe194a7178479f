# SPDX-License-Identifier: Apache-2.0
"""Tiles through Transformer Engine's fused (cuDNN) attention.

Shapes: G independent problems of one tile, T rows, U keys, N query heads, K key/value heads, D head dim.
"""

import torch
from torch import Tensor

from megatron_csbp.transformer.kernels.batch_limits import CUDNN_PROBLEMS, in_batches
from megatron_csbp.transformer.kernels.transformer_engine_adapter import FusedAttention
from megatron_csbp.transformer.kernels.transformer_engine_symbols import import_symbols


class TransformerEngineKernel:
    """Transformer Engine's fused attention: fp16 and bf16, grouped-query heads without copies.

    Args:
        functions: the adapted functions; those of the installed Transformer Engine by default.

    Raises:
        ValueError: Transformer Engine is not usable; says why and what to use instead.
    """

    name = "transformer_engine"

    def __init__(self, functions: FusedAttention | None = None) -> None:
        self._functions = FusedAttention(import_symbols()) if functions is None else functions

    def forward(
        self, query_GTND: Tensor, key_GUKD: Tensor, value_GUKD: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionKernel.forward`."""

        def attend(*tensors_GTND: Tensor) -> tuple[Tensor, ...]:
            tensor_format = _cheaper_format(*tensors_GTND)
            query, key, value = (_arranged(tensor, tensor_format) for tensor in tensors_GTND)
            out, lse_GNT1 = self._functions.forward(
                query, key, value, tensor_format=tensor_format, causal=causal, scale=scale
            )
            return _as_problems(out, tensor_format), lse_GNT1.squeeze(-1).transpose(1, 2)

        out_GTND, lse_GTN = in_batches(attend, (query_GTND, key_GUKD, value_GUKD), CUDNN_PROBLEMS)
        return out_GTND, lse_GTN

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
        """See `AttentionKernel.backward`. The gradients are in the input dtype: cuDNN writes no wider one."""
        statistics_dtype = torch.promote_types(query_GTND.dtype, torch.float32)

        def differentiate(*given: Tensor) -> tuple[Tensor, ...]:
            *tensors_GTND, lse_GTN = given
            tensor_format = _cheaper_format(*tensors_GTND)
            grad_out, query, key, value, out = (_arranged(tensor, tensor_format) for tensor in tensors_GTND)
            lse_GNT1 = lse_GTN.to(statistics_dtype).transpose(1, 2).unsqueeze(-1).contiguous()
            grads = self._functions.backward(
                grad_out, query, key, value, out, lse_GNT1, tensor_format=tensor_format, causal=causal, scale=scale
            )
            return tuple(_as_problems(grad, tensor_format) for grad in grads)

        given = (grad_out_GTND, query_GTND, key_GUKD, value_GUKD, out_GTND, lse_GTN)
        grad_query, grad_key, grad_value = in_batches(differentiate, given, CUDNN_PROBLEMS)
        return grad_query, grad_key, grad_value


def _cheaper_format(*tensors_GTND: Tensor) -> str:
    """Return the format that copies fewer elements; Transformer Engine wants all tensors contiguous in one format."""
    copied = {
        tensor_format: sum(
            tensor.numel() for tensor in tensors_GTND if not _in_order(tensor, tensor_format).is_contiguous()
        )
        for tensor_format in ("bshd", "sbhd")
    }
    return min(copied, key=copied.__getitem__)


def _in_order(tensor_GTND: Tensor, tensor_format: str) -> Tensor:
    return tensor_GTND if tensor_format == "bshd" else tensor_GTND.transpose(0, 1)


def _arranged(tensor_GTND: Tensor, tensor_format: str) -> Tensor:
    return _in_order(tensor_GTND, tensor_format).contiguous()


def _as_problems(tensor: Tensor, tensor_format: str) -> Tensor:
    """Undo `_in_order`: swapping the first two dims is its own inverse."""
    return _in_order(tensor, tensor_format)
