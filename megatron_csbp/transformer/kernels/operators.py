# SPDX-License-Identifier: Apache-2.0
"""The name of the operator that a backend uses for each kind of tile of a plan, for people to read.

Shapes: T rows and U keys of one problem, N query heads, K key/value heads, D head dim.
"""

import torch

from megatron_csbp.transformer.geometry.plan import AttentionPlan
from megatron_csbp.transformer.geometry.tiles import KeySource, MaskKind, Tile
from megatron_csbp.transformer.kernels.interface import AttentionKernel
from megatron_csbp.transformer.kernels.local_interface import LocalKernel
from megatron_csbp.transformer.kernels.self_test import HeadShape
from megatron_csbp.transformer.kernels.transformer_engine_call import mask_type

ALL_FLASH = (
    "PyTorch takes flash attention for every tile; since torch 2.11 its selector prefers cuDNN on Hopper, which is "
    "faster on large tiles. Use a newer torch, or --csbp-attention-backend transformer_engine."
)
_PREFERS_CUDNN = (2, 11)


def operator_names(
    kernel: AttentionKernel, plan: AttentionPlan, heads: HeadShape, dtype: torch.dtype, device: torch.device
) -> dict[str, str]:
    """Return, by kind of tile, the operator or operators that compute it.

    Args:
        kernel: the backend.
        plan: the rank's tiles.
        heads: heads on this rank.
        dtype: dtype of the tensors.
        device: where they live.
    """
    names: dict[str, set[str]] = {}
    for tile in plan.tiles:
        if isinstance(kernel, LocalKernel) and tile.key_source is KeySource.LOCAL:
            names.setdefault("all local tiles", set()).add("FlexAttention, one call")
        else:
            names.setdefault(tile.kind, set()).add(_operator(kernel, tile, heads, dtype, device))
    return {kind: ", ".join(sorted(operators)) for kind, operators in names.items()}


def takes_flash_for_everything(names: dict[str, str], torch_version: str) -> bool:
    """Return whether this is a PyTorch that does not know better than to take flash attention for all tiles.

    Args:
        names: what `operator_names` returns.
        torch_version: such as `2.10.0+cu128`.
    """
    major, minor = (int(part) for part in torch_version.split(".")[:2])
    of_tiles = [operator for kind, operator in names.items() if kind != "all local tiles"]
    return (major, minor) < _PREFERS_CUDNN and set(of_tiles) == {"flash"}


def _operator(kernel: AttentionKernel, tile: Tile, heads: HeadShape, dtype: torch.dtype, device: torch.device) -> str:
    backend = getattr(kernel, "gathered", kernel).name
    causal = tile.mask is not MaskKind.FULL
    ratio = heads.num_query_heads // heads.num_key_value_heads
    rows = tile.query.num_rows * (ratio if tile.folds_heads else 1)
    if backend == "transformer_engine":
        return f"cuDNN ({mask_type(rows, tile.key.num_rows, causal=causal)})"
    if device.type == "cpu" or backend == "reference":
        return "dense" if backend == "reference" else "flash on the CPU"
    from megatron_csbp.transformer.kernels.torch_cuda import choose_operator

    # The choice depends on lengths, and on N/K: one key head stands for all.
    query, key = (
        torch.empty(1, length, count, heads.head_dim, dtype=dtype, device=device).transpose(1, 2)
        for length, count in ((rows, 1 if tile.folds_heads else ratio), (tile.key.num_rows, 1))
    )
    choice = choose_operator(query, key, key, causal=causal, scale=1.0)
    return {"CUDNN_ATTENTION": "cuDNN", "FLASH_ATTENTION": "flash"}[choice.name]
