# SPDX-License-Identifier: Apache-2.0
"""What this package uses of Transformer Engine, imported at one place."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Symbols:
    """What is used of Transformer Engine.

    Attributes:
        fused_attn_fwd: forward function.
        fused_attn_bwd: backward function.
        backend: the cuDNN sub-backend whose softmax statistics are a log-sum-exp (F16_arbitrary_seqlen).
        attention_params: dataclass that describes a call to the selector.
        get_attention_backend: Transformer Engine's selector, which also reads the NVTE_* variables.
        dtypes: Transformer Engine's dtype of a torch dtype.
        version: version of the package.
    """

    fused_attn_fwd: Callable[..., Any]
    fused_attn_bwd: Callable[..., Any]
    backend: Any
    attention_params: Any
    get_attention_backend: Callable[[Any], tuple[Any, ...]]
    dtypes: Mapping[torch.dtype, Any]
    version: str


def import_symbols() -> Symbols:
    """Import Transformer Engine and return what is used of it.

    Raises:
        ValueError: it is not installed, does not import, or lacks a symbol; says which and what to use instead.
    """
    try:
        functions = importlib.import_module("transformer_engine.pytorch.cpp_extensions.fused_attn")
        utils = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.utils")
        constants = importlib.import_module("transformer_engine.pytorch.constants")
        return Symbols(
            fused_attn_fwd=functions.fused_attn_fwd,
            fused_attn_bwd=functions.fused_attn_bwd,
            backend=functions.FusedAttnBackend["F16_arbitrary_seqlen"],
            attention_params=utils.AttentionParams,
            get_attention_backend=utils.get_attention_backend,
            dtypes=constants.TE_DType,
            version=importlib.import_module("transformer_engine").__version__,
        )
    except (ImportError, AttributeError, KeyError, OSError, RuntimeError, AssertionError) as error:
        raise ValueError(
            "--csbp-attention-backend transformer_engine needs Transformer Engine 2.9 or later, which does not import "
            f"here ({type(error).__name__}: {error}); install it as docs/gpu.md says, or use --csbp-attention-backend "
            "torch."
        ) from error
