# SPDX-License-Identifier: Apache-2.0
"""The local tiles of a plan as a FlexAttention block mask, without a tensor of S x S.

Shapes: S local rows; Q blocks of 128 rows, in which FlexAttention skips or computes.
"""

import weakref
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from megatron_csbp.transformer.geometry.needs import Lowering
from megatron_csbp.transformer.geometry.plan import AttentionPlan
from megatron_csbp.transformer.geometry.scheme import CLEAN
from megatron_csbp.transformer.geometry.tiles import MaskKind, Tile
from megatron_csbp.transformer.geometry.visibility import visibility

BLOCK = 128

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

_masks: "weakref.WeakKeyDictionary[AttentionPlan, dict[torch.device, BlockMask]]" = weakref.WeakKeyDictionary()


def local_block_mask(plan: AttentionPlan, device: torch.device) -> BlockMask:
    """Return the block mask of the plan's local tiles; one object for all layers, so that it is compiled once.

    Args:
        plan: the rank's tiles.
        device: where the tensors live.
    """
    of_plan = _masks.setdefault(plan, {})
    if device not in of_plan:
        of_plan[device] = _block_mask(plan, device)
    return of_plan[device]


def _block_mask(plan: AttentionPlan, device: torch.device) -> BlockMask:
    pairs_QQ = pairs_by_block(plan)
    full_QQ = pairs_QQ == BLOCK * BLOCK  # a block cut short by the last row is partial: its tail must be masked
    partial_QQ = (pairs_QQ > 0) & ~full_QQ
    return BlockMask.from_kv_blocks(
        *_ordered(partial_QQ, device),
        *_ordered(full_QQ, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=local_mask_function(plan, device),
        seq_lengths=(plan.rows.num_rows, plan.rows.num_rows),
    )


def local_mask_function(plan: AttentionPlan, device: torch.device) -> MaskFunction:
    """Return who sees whom among local rows, as a function of row numbers, for FlexAttention.

    Each row has a code as a key: a clean row its position, a corrupted row L plus L times its view plus its position.
    A query sees the codes of two ranges: local clean keys, and its own block.
    """
    rows, length = plan.rows, plan.rows.sample.length
    seen = visibility(rows.sample, rows.sample_positions, rows.copies, plan.mask)
    low, high = seen.lo, seen.hi
    if plan.clean.lowering is Lowering.ALL_GATHER:
        # What lies before a row's own chunk comes with the gathered keys, even if this rank holds it.
        low = np.maximum(low, rows.sample_positions // rows.chunk_length * rows.chunk_length)
    offset = length * (1 + rows.copies)
    if not plan.clean_queries:
        high = np.where(rows.copies == CLEAN, low, high)

    def on_device(values_S: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values_S.astype(np.int32)).to(device)

    code_S = on_device(np.where(rows.copies == CLEAN, rows.sample_positions, offset + rows.sample_positions))
    low_S, high_S = on_device(low), on_device(high)
    own_low_S, own_high_S = on_device(offset + seen.own_start), on_device(offset + seen.own_stop)

    def allowed(batch: Tensor, head: Tensor, query_row: Tensor, key_row: Tensor) -> Tensor:
        code = code_S[key_row]
        clean = (code >= low_S[query_row]) & (code < high_S[query_row])
        own = (code >= own_low_S[query_row]) & (code < own_high_S[query_row])
        return clean | own

    return allowed


def pairs_by_block(plan: AttentionPlan) -> npt.NDArray[np.int64]:
    """Return how many pairs the local tiles allow in each block of 128 x 128 rows, int64 [Q, Q]."""
    num_blocks = -(-plan.rows.num_rows // BLOCK)
    pairs_QQ = np.zeros((num_blocks, num_blocks), np.int64)
    for tile in plan.local_tiles:
        # The runs of a problem's rows meet the same keys.
        runs = tile.query.rows().reshape(tile.query.num_problems, -1, tile.query.length)[:, :, 0]
        for query_starts, key_start in zip(runs, tile.key.problem_starts(), strict=True):
            for query_start in query_starts:
                _add_run(pairs_QQ, tile, int(query_start), int(key_start))
    return pairs_QQ


def _add_run(pairs_QQ: npt.NDArray[np.int64], tile: Tile, query_start: int, key_start: int) -> None:
    """Add the pairs of one run of a tile, in place."""
    query_blocks, query_edges = _edges(query_start, tile.query.length)
    key_blocks, key_edges = _edges(key_start, tile.key.length)
    # Pairs above and left of each corner; their second differences are the pairs inside the blocks.
    rows, keys = query_edges[:, None], key_edges[None, :]
    whole = np.minimum(rows, keys)
    triangle = whole * (whole + 1) // 2 + (rows - whole) * keys
    corners = rows * keys
    if tile.mask is MaskKind.CAUSAL:
        corners = triangle
    elif tile.mask is MaskKind.ANTICAUSAL:
        # All pairs less those strictly below the diagonal.
        corners = corners - triangle + whole
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
