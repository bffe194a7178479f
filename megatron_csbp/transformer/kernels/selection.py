# SPDX-License-Identifier: Apache-2.0
"""The choice of an attention backend by name and device. Nothing falls back: what cannot run is refused by name.

A backend is imported when it is chosen, so that what one of them needs is no condition of the others.
"""

import importlib
import importlib.util
import os
from functools import cache
from typing import NamedTuple

import torch

from megatron_csbp.transformer.kernels.interface import AttentionKernel

_NAMES = ("auto", "transformer_engine", "torch", "flex", "hybrid", "reference")
_NEED_CUDA = ("transformer_engine", "flex", "hybrid")
# Module and class; "torch" has one for each type of device.
_CLASSES = {
    "transformer_engine": ("transformer_engine", "TransformerEngineKernel"),
    "flex": ("flex", "FlexKernel"),
    "reference": ("reference", "ReferenceKernel"),
    "torch cpu": ("torch_kernel", "TorchCpuKernel"),
    "torch cuda": ("torch_cuda", "TorchCudaKernel"),
}
HYBRID_CHUNK_ROWS = 1024
"""Chunks up to this length are computed by `hybrid` under `auto`. Modelled, not measured: the launches of the local
tiles take about as long as one FlexAttention call on chunks of this length (docs/gpu.md)."""


class Choice(NamedTuple):
    """A backend, and why it was chosen.

    Attributes:
        name: of the backend.
        reason: one clause for the start summary.
    """

    name: str
    reason: str


def select_kernel(
    name: str,
    device: torch.device,
    megatron_attention_backend: str = "auto",
    static_chunk_rows: int | None = None,
) -> AttentionKernel:
    """Return the kernel that `--csbp-attention-backend` names, on `device`; see `choose_backend`.

    Args:
        name: `auto`, `transformer_engine`, `torch`, `flex`, `hybrid` or (for tests) `reference`.
        device: where the tensors live.
        megatron_attention_backend: value of Megatron's own `--attention-backend`, which turns parts of Transformer
            Engine off.
        static_chunk_rows: C, if all samples have one geometry.

    Raises:
        ValueError: no such backend, or it does not run on this device or with these settings.
    """
    name = choose_backend(name, device, megatron_attention_backend, static_chunk_rows).name
    return _kernel(name, device.type, _best_for_tiles(device, megatron_attention_backend).name)


def choose_backend(
    name: str,
    device: torch.device,
    megatron_attention_backend: str = "auto",
    static_chunk_rows: int | None = None,
) -> Choice:
    """Return the backend that a name stands for, and why.

    `auto` is `torch` on a CPU. On CUDA it is `transformer_engine` where that is installed and its fused attention is
    not turned off, else `torch`; or, in short sequences of one geometry, `hybrid`, which has either for gathered keys.

    Args:
        name: see `select_kernel`.
        device: see `select_kernel`.
        megatron_attention_backend: see `select_kernel`.
        static_chunk_rows: see `select_kernel`.

    Raises:
        ValueError: see `select_kernel`.
    """
    if name not in _NAMES:
        raise ValueError(f"--csbp-attention-backend {name!r} is not a backend; use {', '.join(_NAMES[:-1])}.")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"--csbp-attention-backend {name} has no kernel for device {device.type!r}; run on CUDA, or with --device "
            "cpu."
        )
    if device.type == "cpu" and name in _NEED_CUDA:
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
    if name != "auto":
        return Choice(name, "--csbp-attention-backend names it")
    for_tiles = _best_for_tiles(device, megatron_attention_backend)
    is_short = static_chunk_rows is not None and static_chunk_rows <= HYBRID_CHUNK_ROWS
    if not is_short or device.type == "cpu" or importlib.util.find_spec("triton") is None:
        return for_tiles
    return Choice(
        "hybrid",
        f"chunks of {static_chunk_rows} rows are short: one FlexAttention call has fewer launches than their tiles "
        f"(modelled, up to {HYBRID_CHUNK_ROWS}); gathered keys go to {for_tiles.name}: {for_tiles.reason}",
    )


def _best_for_tiles(device: torch.device, megatron_attention_backend: str) -> Choice:
    """Return the backend that computes tiles one by one."""
    if device.type == "cpu":
        return Choice("torch", "the run is on a CPU")
    if importlib.util.find_spec("transformer_engine") is None:
        return Choice("torch", "Transformer Engine is not installed")
    if not _fused_attention_allowed(megatron_attention_backend):
        return Choice("torch", "Transformer Engine's fused attention is turned off")
    return Choice("transformer_engine", "Transformer Engine is installed")


def _fused_attention_allowed(megatron_attention_backend: str) -> bool:
    """Return what `--attention-backend` and Transformer Engine's own variable say; Megatron sets the latter later."""
    return megatron_attention_backend in ("auto", "fused") and os.environ.get("NVTE_FUSED_ATTN", "1") != "0"


@cache
def _kernel(name: str, device_type: str, for_tiles: str) -> AttentionKernel:
    """Make one kernel of each kind: they remember what they have asked their selectors.

    Raises:
        ValueError: this PyTorch has not what the backend needs.
    """
    if name == "hybrid":
        hybrid = importlib.import_module("megatron_csbp.transformer.kernels.hybrid").HybridKernel
        made: AttentionKernel = hybrid(
            _kernel("flex", device_type, for_tiles), _kernel(for_tiles, device_type, for_tiles)
        )
        return made
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
