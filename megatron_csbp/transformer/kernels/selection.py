# SPDX-License-Identifier: Apache-2.0
"""The choice of an attention backend by name and device. Nothing falls back: what cannot run is refused by name.

A backend is imported when it is chosen, so that what one of them needs is no condition of the others.
"""

import importlib
import importlib.util
import os
from functools import cache

import torch

from megatron_csbp.transformer.kernels.interface import AttentionKernel

_NAMES = ("auto", "transformer_engine", "torch", "flex", "reference")
# Module and class; "torch" has one for each type of device.
_CLASSES = {
    "transformer_engine": ("transformer_engine", "TransformerEngineKernel"),
    "flex": ("flex", "FlexKernel"),
    "reference": ("reference", "ReferenceKernel"),
    "torch cpu": ("torch_kernel", "TorchCpuKernel"),
    "torch cuda": ("torch_cuda", "TorchCudaKernel"),
}


def select_kernel(name: str, device: torch.device, megatron_attention_backend: str = "auto") -> AttentionKernel:
    """Return the kernel that `--csbp-attention-backend` names, on `device`.

    `auto` is `torch` on a CPU. On CUDA it is `transformer_engine` where that is installed and its fused attention is
    not turned off, and else `torch`.

    Args:
        name: `auto`, `transformer_engine`, `torch`, `flex` or (for tests) `reference`.
        device: where the tensors live.
        megatron_attention_backend: value of Megatron's own `--attention-backend`, which turns parts of Transformer
            Engine off.

    Raises:
        ValueError: no such backend, or it does not run on this device or with these settings.
    """
    if name not in _NAMES:
        raise ValueError(f"--csbp-attention-backend {name!r} is not a backend; use {', '.join(_NAMES[:-1])}.")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"--csbp-attention-backend {name} has no kernel for device {device.type!r}; run on CUDA, or with --device "
            "cpu."
        )
    if device.type == "cpu" and name in ("transformer_engine", "flex"):
        raise ValueError(
            f"--csbp-attention-backend {name} needs a CUDA device, and this run is on the CPU; use "
            "--csbp-attention-backend torch."
        )
    if name == "transformer_engine" and not _fused_attention_allowed(megatron_attention_backend):
        raise ValueError(
            "--csbp-attention-backend transformer_engine uses Transformer Engine's fused attention, which "
            f"--attention-backend {megatron_attention_backend} or NVTE_FUSED_ATTN=0 turns off; use "
            "--attention-backend auto or fused, or --csbp-attention-backend torch."
        )
    if name == "auto":
        name = _automatic(device, megatron_attention_backend)
    return _kernel(name, device.type)


def _automatic(device: torch.device, megatron_attention_backend: str) -> str:
    installed = importlib.util.find_spec("transformer_engine") is not None
    usable = device.type == "cuda" and installed and _fused_attention_allowed(megatron_attention_backend)
    return "transformer_engine" if usable else "torch"


def _fused_attention_allowed(megatron_attention_backend: str) -> bool:
    """Return what `--attention-backend` and Transformer Engine's own variable say; Megatron sets the latter later."""
    return megatron_attention_backend in ("auto", "fused") and os.environ.get("NVTE_FUSED_ATTN", "1") != "0"


@cache
def _kernel(name: str, device_type: str) -> AttentionKernel:
    """Make one kernel of each kind: they remember what they have asked their selectors.

    Raises:
        ValueError: this PyTorch has not what the backend needs.
    """
    module, kind = _CLASSES[f"{name} {device_type}" if name == "torch" else name]
    try:
        found = importlib.import_module(f"megatron_csbp.transformer.kernels.{module}")
    except ImportError as error:
        raise ValueError(
            f"--csbp-attention-backend {name} does not import with torch {torch.__version__} ({error}); use "
            f"--csbp-attention-backend {'transformer_engine' if name == 'torch' else 'torch'}."
        ) from error
    kernel: AttentionKernel = getattr(found, kind)()
    return kernel
