# SPDX-License-Identifier: Apache-2.0
"""See `transformer_engine`."""

from transformer_engine.pytorch import distributed, fp8
from transformer_engine.pytorch.module import (
    DotProductAttention,
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    Linear,
    RMSNorm,
)

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "distributed",
    "fp8",
]
