# SPDX-License-Identifier: Apache-2.0
"""Linear layers, norms and attention with the constructors and the state of Transformer Engine's.

Shapes: S rows, B micro-batch, N query heads, K key/value heads, D head dim.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor


class _Module(torch.nn.Module):
    """Has Transformer Engine's extra state, which is empty without FP8."""

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        assert state.numel() == 0


class _Norm(_Module):
    def __init__(
        self,
        normalized_shape: int,
        eps: float,
        sequence_parallel: bool,
        zero_centered_gamma: bool,
        params_dtype: torch.dtype,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.centre = float(zero_centered_gamma)
        self.weight = torch.nn.Parameter(torch.full((normalized_shape,), 1 - self.centre, dtype=params_dtype))
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]


class RMSNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight + self.centre, self.eps)


class LayerNorm(_Norm):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.bias = torch.nn.Parameter(torch.zeros_like(self.weight))
        self.bias.sequence_parallel = options["sequence_parallel"]  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + self.centre
        return torch.nn.functional.layer_norm(x, weight.shape, weight, self.bias, self.eps)


class Linear(_Module):
    """A linear layer whose weight is split over tensor-parallel ranks by outputs (`column`) or inputs (`row`)."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool,
        fuse_wgrad_accumulation: bool,
        tp_group: Any,
        tp_size: int,
        get_rng_state_tracker: Callable[[], Any] | None,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        return_bias: bool,
        parallel_mode: str | None,
        params_dtype: torch.dtype,
        device: Any = None,
        rng_tracker_name: str | None = None,
    ) -> None:
        super().__init__()
        assert not any((fuse_wgrad_accumulation, bias, return_bias))
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.parallel_mode, self.tp_group, self.tp_size = parallel_mode, tp_group, tp_size
        self.sequence_parallel = sequence_parallel and tp_size > 1
        shape = [out_features, in_features]
        if parallel_mode is not None:
            shape[parallel_mode == "row"] //= tp_size
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=params_dtype))
        tracker = None if get_rng_state_tracker is None else get_rng_state_tracker()
        names = () if rng_tracker_name is None else (rng_tracker_name,)
        with nullcontext() if tracker is None else tracker.fork(*names):
            init_method(self.weight)
        for name, value in (
            ("tensor_model_parallel", parallel_mode is not None),
            ("partition_dim", int(parallel_mode == "row")),
            ("partition_stride", 1),
        ):
            setattr(self.weight, name, value)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        from megatron.core import tensor_parallel as tp

        if self.parallel_mode == "column":
            if self.sequence_parallel:
                x = tp.gather_from_sequence_parallel_region(x, group=self.tp_group)
            else:
                x = tp.copy_to_tensor_model_parallel_region(x, group=self.tp_group)
        out = torch.nn.functional.linear(x, self.weight)
        if self.parallel_mode == "row":
            reduce = tp.reduce_from_tensor_model_parallel_region
            if self.sequence_parallel:
                reduce = tp.reduce_scatter_to_sequence_parallel_region
            out = reduce(out, group=self.tp_group)
        return out


class LayerNormLinear(Linear):
    """A norm and a linear layer in one module."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float,
        normalization: str,
        return_layernorm_output: bool,
        zero_centered_gamma: bool,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, **options)
        assert normalization == "RMSNorm"
        assert not return_layernorm_output
        self.eps = eps
        self.centre = float(zero_centered_gamma)
        start = torch.full((in_features,), 1 - self.centre, dtype=options["params_dtype"])
        self.layer_norm_weight = torch.nn.Parameter(start)
        self.layer_norm_weight.sequence_parallel = options["sequence_parallel"]  # type: ignore[attr-defined]

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        weight = self.layer_norm_weight + self.centre
        normed = torch.nn.functional.rms_norm(x, weight.shape, weight, self.eps)
        return super().forward(normed, is_first_microbatch)


class GroupedLinear(_Module):
    """Megatron derives a class from this; nothing builds it without --moe-grouped-gemm."""


class DotProductAttention(_Module):
    """Causal attention, for stock models."""

    def __init__(self, num_attention_heads: int, kv_channels: int, *, num_gqa_groups: int, **options: Any) -> None:
        super().__init__()
        assert options["attn_mask_type"] == "causal"
        assert "cp_group" not in options
        self._grouped = num_gqa_groups != num_attention_heads

    def forward(
        self, query_SBND: Tensor, key_SBKD: Tensor, value_SBKD: Tensor, attention_mask: Any, attn_mask_type: str
    ) -> Tensor:
        assert attn_mask_type == "causal"
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query_SBND, key_SBKD, value_SBKD))
        out_BNSD = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self._grouped
        )
        return out_BNSD.permute(2, 0, 1, 3).flatten(2)
