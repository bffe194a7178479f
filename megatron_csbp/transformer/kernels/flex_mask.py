# SPDX-License-Identifier: Apache-2.0
"""The local tiles of a plan as a FlexAttention block mask, without a tensor of S x S.

Shapes: S local rows; Q blocks of 128 rows, in which FlexAttention skips or computes.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from megatron_csbp.transformer.attention_plan import AttentionPlan, CleanAttention
from megatron_csbp.transformer.layout import SequenceLayout
from megatron_csbp.transformer.tile import MaskKind, Tile

BLOCK = 128

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@lru_cache(maxsize=8)
def local_block_mask(layout: SequenceLayout, clean_attention: CleanAttention, device: torch.device) -> BlockMask:
    """Return the block mask of the plan's local tiles; one object for all layers, so that it is compiled once.

    Args:
        layout: the rank's rows.
        clean_attention: mask of the clean copy.
        device: where the tensors live.
    """
    pairs_QQ = pairs_by_block(AttentionPlan(layout, clean_attention))
    full_QQ = pairs_QQ == BLOCK * BLOCK  # a block cut short by the last row is partial: its tail must be masked
    partial_QQ = (pairs_QQ > 0) & ~full_QQ
    return BlockMask.from_kv_blocks(
        *_ordered(partial_QQ, device),
        *_ordered(full_QQ, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=local_mask_function(layout, clean_attention, device),
        seq_lengths=(layout.num_rows, layout.num_rows),
    )


def local_mask_function(layout: SequenceLayout, clean_attention: CleanAttention, device: torch.device) -> MaskFunction:
    """Return who sees whom among local rows, as a function of row numbers, for FlexAttention.

    Each row has a code as a key: a clean row its position, a corrupted row L plus its block. A query sees the codes of
    one range, and one code more if it is corrupted: that of its own block.
    """
    length, block_size = layout.sequence_length, layout.block_size
    positions, corrupted = layout.positions, layout.is_corrupted
    blocks = positions // block_size
    own_block = length + blocks
    end = np.where(corrupted, blocks * block_size, _clean_end(positions, block_size, clean_attention))
    chunk_start = positions // layout.chunk_length * layout.chunk_length
    start = np.zeros_like(positions) if layout.clean_is_replicated else chunk_start

    def on_device(values_S: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values_S.astype(np.int32)).to(device)

    code_S = on_device(np.where(corrupted, own_block, positions))
    start_S, end_S = on_device(start), on_device(end)
    own_S = on_device(np.where(corrupted, own_block, -1))

    def allowed(batch: Tensor, head: Tensor, query_row: Tensor, key_row: Tensor) -> Tensor:
        code = code_S[key_row]
        seen = (code >= start_S[query_row]) & (code < end_S[query_row])
        return seen | (code == own_S[query_row])

    return allowed


def _clean_end(
    positions: npt.NDArray[np.int64], block_size: int, clean_attention: CleanAttention
) -> npt.NDArray[np.int64]:
    """Return the first position that a clean row does not see."""
    if clean_attention is CleanAttention.TOKEN_CAUSAL:
        return positions + 1
    return (positions // block_size + 1) * block_size


def pairs_by_block(plan: AttentionPlan) -> npt.NDArray[np.int64]:
    """Return how many pairs the local tiles allow in each block of 128 x 128 rows, int64 [Q, Q]."""
    num_blocks = -(-plan.layout.num_rows // BLOCK)
    pairs_QQ = np.zeros((num_blocks, num_blocks), np.int64)
    for tile in plan.local_tiles:
        for query_start, key_start in zip(tile.query.rows()[:, 0], tile.key.rows()[:, 0], strict=True):
            _add_run(pairs_QQ, tile, int(query_start), int(key_start))
    return pairs_QQ


def _add_run(pairs_QQ: npt.NDArray[np.int64], tile: Tile, query_start: int, key_start: int) -> None:
    """Add the pairs of one run of a tile, in place."""
    query_blocks, query_edges = _edges(query_start, tile.query.length)
    key_blocks, key_edges = _edges(key_start, tile.key.length)
    # Pairs above and left of each corner; their second differences are the pairs inside the blocks.
    rows, keys = query_edges[:, None], key_edges[None, :]
    if tile.mask is MaskKind.CAUSAL:
        whole = np.minimum(rows, keys)
        corners = whole * (whole + 1) // 2 + (rows - whole) * keys
    else:
        corners = rows * keys
    pairs_QQ[query_blocks, key_blocks] += np.diff(np.diff(corners, axis=0), axis=1)


def _edges(start: int, length: int) -> tuple[slice, npt.NDArray[np.int64]]:
    """Return the blocks that a run touches, and where their edges lie in the run."""
    first, last = start // BLOCK, -(-(start + length) // BLOCK)
    return slice(first, last), np.clip(np.arange(first, last + 1) * BLOCK - start, 0, length)


def _ordered(chosen_QQ: npt.NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return FlexAttention's form of a choice of blocks: how many in each row, and all numbers, chosen ones first."""
    order_QQ = np.argsort(~chosen_QQ, axis=1, kind="stable").astype(np.int32)
    count_Q = chosen_QQ.sum(axis=1, dtype=np.int32)
    return torch.from_numpy(count_Q)[None, None].to(device), torch.from_numpy(order_QQ)[None, None].to(device)
