# SPDX-License-Identifier: Apache-2.0
"""Norms for Megatron's local layer specs that work under sequence parallelism, and with a zero-centred weight.

Megatron's `WrappedTorchNorm` refuses sequence parallelism, although PyTorch's norms only lack a mark: each rank sees
its own rows, so the gradients of the norm's parameters have to be summed over the tensor-parallel group, and Megatron
does that for parameters marked `sequence_parallel`.

With `--apply-layernorm-1p` the weight is stored without the 1 around which it lies, as Transformer Engine does it
and as the checkpoints of Gemma and Qwen3.5 have it.
"""

import copy
import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_csbp import megatron_compat


class ZeroCentredRMSNorm(torch.nn.RMSNorm):
    """RMSNorm that scales by 1 + weight; the weight starts at 0."""

    def reset_parameters(self) -> None:
        """Start as the identity scale."""
        torch.nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return F.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


class ZeroCentredLayerNorm(torch.nn.LayerNorm):
    """LayerNorm that scales by 1 + weight; weight and bias start at 0."""

    def reset_parameters(self) -> None:
        """Start as the identity scale."""
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return F.layer_norm(x, self.normalized_shape, 1 + self.weight, self.bias, self.eps)


_NORMS: dict[str, tuple[type[torch.nn.Module], type[torch.nn.Module]]] = {
    "LayerNorm": (torch.nn.LayerNorm, ZeroCentredLayerNorm),
    "RMSNorm": (torch.nn.RMSNorm, ZeroCentredRMSNorm),
}
"""Each norm, and the same with a zero-centred weight."""


class SequenceParallelNorm:
    """PyTorch's LayerNorm or RMSNorm with parameters marked for sequence parallelism.

    A drop-in for Megatron's `WrappedTorchNorm`: the same arguments, module class, state-dict keys and numbers. Like
    it, this class builds a plain PyTorch module and has no instances. With `layernorm_zero_centered_gamma`, which
    `WrappedTorchNorm` refuses, it builds the norm with a zero-centred weight.

    Args:
        config: Megatron's `TransformerConfig`.
        hidden_size: Size of the normalised (last) dimension.
        eps: Added to the variance.
        unused: arguments that `WrappedTorchNorm` also takes and ignores.

    Raises:
        ValueError: If the config asks for something that PyTorch's norms do not have.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> torch.nn.Module:  # type: ignore[misc]
        """Build the norm."""
        _check(config)
        norm_class = _NORMS[config.normalization][bool(config.layernorm_zero_centered_gamma)]
        norm = norm_class(normalized_shape=hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def _check(config: Any) -> None:
    if config.normalization not in _NORMS:
        raise ValueError(
            f"--normalization {config.normalization}: the local layer spec has {' and '.join(_NORMS)}; "
            "--normalization RMSNorm works"
        )
    if config.persist_layer_norm:
        raise ValueError("persistent layer norm is an Apex kernel; --no-persist-layer-norm works with the local spec")
    if config.memory_efficient_layer_norm:
        raise ValueError("memory_efficient_layer_norm is an Apex kernel; leave it off with the local spec")


def with_sequence_parallel_norm(spec: Any) -> Any:
    """Copy a layer or block spec with every `WrappedTorchNorm` replaced by `SequenceParallelNorm`.

    The final norm of a model belongs to its block, so a layer spec does not name it and Megatron adds its own. Under
    sequence parallelism turn a layer spec into a block spec first, with `megatron_compat.block_submodules`.

    Args:
        spec: `ModuleSpec` of a layer, or `TransformerBlockSubmodules`. It is not changed.

    Returns:
        The copy. Norms of other kinds (Transformer Engine, Apex, none) stay as they are.
    """
    spec = copy.deepcopy(spec)
    _replace(spec, megatron_compat.local_norm_class(), seen=set())
    return spec


def _replace(node: Any, old: type, seen: set[int]) -> None:
    """Replace in place below lists and dataclasses; specs and submodules are dataclasses."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, list | tuple):
        for child in node:
            _replace(child, old, seen)
    if not dataclasses.is_dataclass(node) or isinstance(node, type):
        return
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if value is old:
            setattr(node, field.name, SequenceParallelNorm)
        else:
            _replace(value, old, seen)
