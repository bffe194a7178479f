# SPDX-License-Identifier: Apache-2.0
"""What a call of Transformer Engine's fused attention depends on besides its tensors, in Transformer Engine's words.

Shapes: G independent problems of one tile (Transformer Engine's batch), T rows, U keys.
"""

import os
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_csbp.transformer.kernels.cudnn_tails import ends_within_a_group


def deterministic_required() -> bool:
    """Return whether only deterministic algorithms may run, by the rule of Transformer Engine's own modules."""
    allowed = bool(int(os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")))
    return torch.are_deterministic_algorithms_enabled() or not allowed


class Call(NamedTuple):
    """All that the arguments of a call depend on besides its tensors."""

    query_shape: torch.Size
    key_shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    tensor_format: str
    causal: bool
    scale: float
    deterministic: bool

    @property
    def problems(self) -> int:
        """G."""
        return self.query_shape[0 if self.tensor_format == "bshd" else 1]

    @property
    def rows(self) -> int:
        """T."""
        return self.query_shape[1 if self.tensor_format == "bshd" else 0]

    @property
    def keys(self) -> int:
        """U."""
        return self.key_shape[1 if self.tensor_format == "bshd" else 0]

    @property
    def mask(self) -> str:
        """Transformer Engine's name of the mask."""
        return mask_type(self.rows, self.keys, causal=self.causal)

    @property
    def layout(self) -> str:
        """Transformer Engine's name of the layout of query, key and value."""
        return "_".join([self.tensor_format] * 3)

    @property
    def window(self) -> tuple[int, int]:
        """How far a row sees to the left and to the right; -1 is no limit."""
        return (-1, 0) if self.causal else (-1, -1)


def mask_type(rows: int, keys: int, *, causal: bool) -> str:
    """Return the mask; a padding mask, by the cumulative lengths, where cuDNN has to be told that a length ends."""
    if ends_within_a_group(rows, keys):
        return "padding_causal" if causal else "padding"
    return "causal" if causal else "no_mask"


def describe(query: Tensor, key: Tensor, value: Tensor, tensor_format: str, causal: bool, scale: float) -> Call:
    """Describe a call by its tensors, which are contiguous in `tensor_format`."""
    # Transformer Engine reads raw pointers: a strided tensor would be misread without an error.
    assert all(tensor.is_contiguous() for tensor in (query, key, value))
    deterministic = deterministic_required()
    return Call(query.shape, key.shape, query.dtype, query.device, tensor_format, causal, scale, deterministic)
