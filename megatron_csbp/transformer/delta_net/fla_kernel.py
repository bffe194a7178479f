# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule by the Triton kernels of flash-linear-attention (fla-core), for CUDA.

Its public function runs whole sequences and is differentiable in the state at the start and at the end, but gives
none in between. So a block is a sequence: one call makes the affine maps of all blocks, from values [v, 0] and start
[0, I]; composed, these give the state at every block's start; and one call from there makes the outputs.

Shapes: G sequences, T rows, H heads, K key dim, V value dim, J blocks of a sequence, W = V + K.
"""

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_csbp.transformer.delta_net.rows import DeltaRows, Keeps, identity_maps
from megatron_csbp.transformer.delta_net.tiling import fla_state_bytes


@cache
def fla_version() -> str | None:
    """Return the version of fla-core that can be used, or None."""
    if importlib.util.find_spec("fla") is None:
        return None
    try:
        chunk_gated_delta_rule()
    except ImportError:
        return None
    return importlib.metadata.version("fla-core")


@cache
def chunk_gated_delta_rule() -> Callable[..., Any]:
    """Return fla's function, which has one name in all versions since 0.3.

    Raises:
        ImportError: fla is not installed, or its Triton is not.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    function: Callable[..., Any] = chunk_gated_delta_rule
    return function


class FlaDeltaRule:
    """See `DeltaRuleKernel`. Takes bf16, fp16 or fp32 rows; states and gates are in fp32."""

    @property
    def name(self) -> str:
        """See `DeltaRuleKernel.name`."""
        return f"fla-core {fla_version()}"

    def state_bytes_of_block(self, block_length: int, key_dim: int, value_dim: int) -> int:
        """See `DeltaRuleKernel.state_bytes_of_block`: a state, a map, and the identity that the map starts from."""
        return fla_state_bytes(key_dim, value_dim)

    def clean(
        self, rows: DeltaRows, state_GHKV: Tensor, block_length: int, keeps: Keeps
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `DeltaRuleKernel.clean`."""
        blocks = _as_sequences(rows, block_length)
        starts_GJHKV, last_GHKV = _compose(_maps(blocks), state_GHKV, keeps)
        out, _ = _run(blocks, starts_GJHKV.flatten(0, 1))
        return out.reshape(rows.value_GTHV.shape), starts_GJHKV, last_GHKV

    def blocks(self, rows: DeltaRows, state_GHKV: Tensor) -> Tensor:
        """See `DeltaRuleKernel.blocks`."""
        return _run(rows, state_GHKV)[0]

    def advance(self, rows: DeltaRows, map_GHKW: Tensor, block_length: int, keeps: Keeps) -> Tensor:
        """See `DeltaRuleKernel.advance`."""
        return _compose(_maps(_as_sequences(rows, block_length)), map_GHKW, keeps)[1]


def _as_sequences(rows: DeltaRows, length: int) -> DeltaRows:
    """Return the blocks [G J, M, ...] of sequences [G, J M, ...]."""
    return DeltaRows(*(torch.unflatten(tensor, 1, (-1, length)).flatten(0, 1) for tensor in rows.tensors))


def _maps(blocks: DeltaRows) -> Tensor:
    """Return the affine map [U, A] of each block, [G J, H, K, W]."""
    widened = DeltaRows(
        blocks.query_GTHK,
        blocks.key_GTHK,
        F.pad(blocks.value_GTHV, (0, blocks.key_GTHK.shape[-1])),
        blocks.log_decay_GTH,
        blocks.beta_GTH,
    )
    return _run(widened, identity_maps(blocks))[1]


def _compose(map_EHKW: Tensor, carried_GHKW: Tensor, keeps: Keeps) -> tuple[Tensor, Tensor]:
    """Carry states, or maps, through the maps of blocks, E = G J.

    Returns:
        What arrives at each block [G, J, H, K, W], and what leaves the last [G, H, K, W].
    """
    sequences, key_dim = len(keeps), map_EHKW.shape[-2]
    value_dim = map_EHKW.shape[-1] - key_dim
    arriving = []
    for block, map_GHKW in enumerate(torch.unflatten(map_EHKW, 0, (sequences, -1)).unbind(1)):
        kept = [float(sequence[block]) for sequence in keeps]
        if not all(kept):
            carried_GHKW = carried_GHKW * carried_GHKW.new_tensor(kept)[:, None, None, None]
        arriving.append(carried_GHKW)
        write, through = torch.split(map_GHKW, [value_dim, key_dim], -1)
        carried_GHKW = through @ carried_GHKW + F.pad(write, (0, carried_GHKW.shape[-1] - value_dim))
    return torch.stack(arriving, 1), carried_GHKW


def _run(rows: DeltaRows, state_GHKV: Tensor) -> tuple[Tensor, Tensor]:
    """Call fla for whole sequences: the outputs [G, T, H, V] and the states at the end [G, H, K, V]."""
    out, last = chunk_gated_delta_rule()(
        q=rows.query_GTHK.contiguous(),
        k=rows.key_GTHK.contiguous(),
        v=rows.value_GTHV.contiguous(),
        g=rows.log_decay_GTH.contiguous(),
        beta=rows.beta_GTH.contiguous(),
        scale=rows.scale,
        initial_state=state_GHKV.contiguous(),
        output_final_state=True,
    )
    return out, last
