# SPDX-License-Identifier: Apache-2.0
"""PyTorch's flash and cuDNN attention operators on CUDA, which return the log-sum-exp. Needs no Transformer Engine.

Shapes: G independent problems of one tile, T rows, U keys, N query heads, K key/value heads, D head dim. The layout of
the operators is [G, N, T, D] over memory in [G, T, N, D] order, so every transpose here is a view.
"""

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention import SDPBackend

from megatron_csbp.transformer.kernels.batch_limits import CUDNN_PROBLEMS, flash_problems, in_batches
from megatron_csbp.transformer.kernels.cudnn_tails import ends_within_a_group

_aten = torch.ops.aten


class TorchCudaKernel:
    """For each tile the operator that PyTorch's own selector names: cuDNN or flash attention, in fp16 or bf16.

    Only where a length is not safe with cuDNN (see `cudnn_tails`) is it flash attention, if that can be used.

    `torch.backends.cuda.enable_cudnn_sdp` and its siblings, `torch.nn.attention.sdpa_kernel` and
    `torch.use_deterministic_algorithms` have their usual effect. Grouped-query heads are not copied.
    """

    name = "torch"

    def __init__(self) -> None:
        # cuDNN's log-sum-exp has had three dims or four by version; its backward expects what its forward returned.
        self._cudnn_lse_dims = 4

    def forward(
        self, query_GTND: Tensor, key_GUKD: Tensor, value_GUKD: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionKernel.forward`.

        Raises:
            ValueError: PyTorch has neither operator for this dtype, head dim or device.
        """
        tensors = tuple(tensor.transpose(1, 2) for tensor in (query_GTND, key_GUKD, value_GUKD))
        if choose_operator(*tensors, causal=causal, scale=scale) == SDPBackend.CUDNN_ATTENTION:

            def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
                out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
                    query, key, value, None, True, 0.0, causal, False, scale=scale
                )
                self._cudnn_lse_dims = lse.dim()
                return out, lse.reshape(query.shape[:3])

            out, lse = in_batches(attend, tensors, CUDNN_PROBLEMS)
        else:
            out, lse, *_ = _aten._scaled_dot_product_flash_attention(*tensors, 0.0, causal, False, scale=scale)
        return out.transpose(1, 2), lse.transpose(1, 2)

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
        """See `AttentionKernel.backward`. The gradients are in the input dtype: the operators write no wider one."""
        grad_out, query, key, value, out = (
            tensor.transpose(1, 2) for tensor in (grad_out_GTND, query_GTND, key_GUKD, value_GUKD, out_GTND)
        )
        # PyTorch keeps cuDNN's plans by the sizes and strides of query, key and value alone. Those of the output and
        # of its gradient may not vary beside them, and do not: both are slices of dense tensors with all heads.
        # Both operators read the log-sum-exp through its pointer, as [G, N, T].
        lse_GNT = lse_GTN.to(torch.promote_types(query.dtype, torch.float32)).transpose(1, 2).contiguous()
        tensors = (grad_out, query, key, value, out)
        rows, keys = query.shape[2], key.shape[2]
        if choose_operator(query, key, value, causal=causal, scale=scale) == SDPBackend.CUDNN_ATTENTION:
            lse = lse_GNT.unsqueeze(-1) if self._cudnn_lse_dims == 4 else lse_GNT
            dropout = (_unused(query, ()), _unused(query, ()))
            most = CUDNN_PROBLEMS

            def differentiate(*tensors: Tensor) -> tuple[Tensor, ...]:
                grads: tuple[Tensor, ...] = _aten._scaled_dot_product_cudnn_attention_backward(
                    *tensors, *dropout, None, None, None, rows, keys, 0.0, causal, scale=scale
                )
                return grads[:3]

        else:
            lse = lse_GNT
            dropout = (_unused(query, (2,)).to(torch.uint64), _unused(query, ()).to(torch.uint64))
            most = flash_problems(rows, query.shape[1], query.shape[3])

            def differentiate(*tensors: Tensor) -> tuple[Tensor, ...]:
                grads: tuple[Tensor, ...] = _aten._scaled_dot_product_flash_attention_backward(
                    *tensors, None, None, rows, keys, 0.0, causal, *dropout, scale=scale
                )
                return grads[:3]

        grads = in_batches(differentiate, (*tensors, lse), most)
        grad_query, grad_key, grad_value = (grad.transpose(1, 2) for grad in grads)
        return grad_query, grad_key, grad_value


def choose_operator(
    query_GNTD: Tensor, key_GKUD: Tensor, value_GKUD: Tensor, *, causal: bool, scale: float
) -> SDPBackend:
    """Return the operator to use, `CUDNN_ATTENTION` or `FLASH_ATTENTION`: the same one for forward and backward.

    Args:
        query_GNTD: queries, [G, N, T, D].
        key_GKUD: keys, [G, K, U, D].
        value_GKUD: values, likewise.
        causal: whether row i sees keys up to i only.
        scale: factor on the scores.

    Raises:
        ValueError: PyTorch would use an operator without a log-sum-exp or without grouped-query heads.
    """
    head_dim = query_GNTD.shape[-1]
    with torch.enable_grad():  # some limits hold in backward only, and are checked only for what needs a gradient
        query, key, value = (tensor.detach().requires_grad_() for tensor in (query_GNTD, key_GKUD, value_GKUD))
        choice = SDPBackend(
            torch._fused_sdp_choice(query, key, value, None, 0.0, causal, scale=scale, enable_gqa=True)
        )
        if choice == SDPBackend.CUDNN_ATTENTION and ends_within_a_group(query.shape[2], key.shape[2]):
            # No padding mask can be given to PyTorch's cuDNN operator.
            asked = SDPAParams(query, key, value, None, 0.0, causal, True)
            choice = SDPBackend.FLASH_ATTENTION if can_use_flash_attention(asked) else choice
    # PyTorch pads other head dims before it calls the flash operator.
    padded = choice == SDPBackend.FLASH_ATTENTION and head_dim % 8 != 0
    if choice not in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION) or padded:
        raise ValueError(
            f"--csbp-attention-backend torch: PyTorch's cuDNN and flash attention do not take {query_GNTD.dtype} with "
            f"head dim {head_dim} on {query_GNTD.device} (its choice is {choice.name}). They take fp16 and bf16 with "
            "a head dim that is a multiple of 8 up to 256, on compute capability 8.0 or later. Use --bf16."
        )
    return choice


def _unused(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a stand-in for the random state of dropout, which nothing reads without dropout."""
    return torch.zeros(shape, dtype=torch.int64, device=like.device)
