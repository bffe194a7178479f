# SPDX-License-Identifier: Apache-2.0
"""Merge of partial attention results by their log-sum-exp, in fp32 (fp64 for fp64 inputs).

On CUDA it is one Triton kernel, where Triton is installed (PyTorch's wheels for Linux bring it). Elsewhere it is
written out in PyTorch, which is also what the kernel is tested against.

Shapes: leading dims are free but equal; N query heads, D head dim.
"""

import importlib
import importlib.util
from functools import cache

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which results of `dtype` are merged and accumulated: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


@cache
def has_fused_merge(device_type: str) -> bool:
    """Return whether the merge is one kernel on devices of a type, `cpu` or `cuda`."""
    return device_type == "cuda" and importlib.util.find_spec("triton") is not None


def merge_partial(
    out_ND: Tensor,
    lse_N: Tensor,
    partial_out_ND: Tensor,
    partial_lse_N: Tensor,
    final_ND: Tensor | None = None,
) -> None:
    """Merge a partial attention result into an accumulated one, in place.

    Softmax over the union of two key sets is the average of both outputs weighted by exp(lse). A side that saw no key
    has lse = -inf and weight 0 (its output must still be finite); if both saw none the accumulated row stays as it is.
    NaN on either side stays NaN.

    Args:
        out_ND: accumulated output, [..., N, D] in the accumulation dtype; changed in place.
        lse_N: accumulated log-sum-exp (natural log), [..., N] in the accumulation dtype; changed in place.
        partial_out_ND: output over further keys, [..., N, D], any floating dtype.
        partial_lse_N: its log-sum-exp, [..., N].
        final_ND: for the last merge of these rows: takes the merged output, [..., N, D] in its own dtype, in place of
            `out_ND`, whose content is undefined afterwards. This saves a pass that only changes the dtype.
    """
    if has_fused_merge(out_ND.device.type):
        importlib.import_module("megatron_csbp.transformer.kernels.triton_merge").merge_fused(
            out_ND, lse_N, partial_out_ND, partial_lse_N, final_ND
        )
        return
    partial_lse_N = partial_lse_N.to(lse_N.dtype)
    weight_N = torch.sigmoid(partial_lse_N - lse_N)
    # -inf on both sides has no difference; the weight of a side without keys is 0 whatever the other side is.
    weight_N.masked_fill_(partial_lse_N == -torch.inf, 0.0)
    out_ND.lerp_(partial_out_ND.to(out_ND.dtype), weight_N.unsqueeze(-1))
    torch.logaddexp(lse_N, partial_lse_N, out=lse_N)
    if final_ND is not None:
        final_ND.copy_(out_ND)
