# SPDX-License-Identifier: Apache-2.0
"""Who sees whom: the one definition of the mask. Pure.

A row sees one interval [lo, hi) of clean positions and, if it is corrupted, its own block of its own view:

    row at position p, block [s, e), document [d, ...)      lo                  hi       own block
    clean, token-causal                                     max(d, p - w + 1)   p + 1    -
    clean, block-causal                                     max(d, p - w + 1)   e        -
    corrupted, window anchored at the row's position        max(d, p - w + 1)   s        [s, e)
    corrupted, window anchored at the row's block           max(d, s - w + 1)   s        [s, e)

w is infinite without a window; e is cut at the document's end. Everything else (tiles, transfers, pair counts, the
FlexAttention mask, the dense mask of the tests, figures) derives from `raw_lower` and `raw_upper`.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from megatron_csbp.transformer.geometry.sample import BoolArray, IntArray, Sample
from megatron_csbp.transformer.geometry.scheme import CLEAN


class CleanAttention(StrEnum):
    """What a clean row sees of the clean copy: earlier tokens, or its own block and earlier blocks."""

    TOKEN_CAUSAL = "token-causal"
    BLOCK_CAUSAL = "block-causal"


class WindowAnchor(StrEnum):
    """Where the window of a corrupted row ends: at its own position (Megatron) or at its block (DiffusionGemma)."""

    POSITION = "position"
    BLOCK = "block"


@dataclass(frozen=True)
class Mask:
    """The mask of one layer.

    Attributes:
        clean_attention: what clean rows see.
        window: w, a row sees clean keys less than w behind its anchor; None for all.
        anchor: what the window of a corrupted row is counted from.

    Raises:
        ValueError: the window is below 1.
    """

    clean_attention: CleanAttention
    window: int | None = None
    anchor: WindowAnchor = WindowAnchor.POSITION

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window {self.window} must be at least 1 position; None turns it off.")

    @property
    def anchors_at_blocks(self) -> bool:
        """Whether all corrupted rows of a block see the same clean keys."""
        return self.window is None or self.anchor is WindowAnchor.BLOCK


def raw_lower[T: (int, IntArray)](position: T, block_start: T, mask: Mask, corrupted: bool) -> T:
    """Return lo before it is cut at the document's start; only for a mask with a window."""
    assert mask.window is not None
    at_block = corrupted and mask.anchor is WindowAnchor.BLOCK
    return (block_start if at_block else position) - (mask.window - 1)


def raw_upper[T: (int, IntArray)](position: T, block_start: T, block_stop: T, mask: Mask, corrupted: bool) -> T:
    """Return hi."""
    if corrupted:
        return block_start
    return position + 1 if mask.clean_attention is CleanAttention.TOKEN_CAUSAL else block_stop


@dataclass(frozen=True, eq=False)
class Visibility:
    """What rows see, row by row; rows of padding see nothing, except that a document's last block is padded.

    Attributes:
        lo: first clean position that a row sees, int64 [S].
        hi: first one behind it that it does not see, int64 [S]; lo = hi where it sees none.
        own_start: first position of a corrupted row's own block, int64 [S].
        own_stop: first position behind it, int64 [S]; own_start = own_stop for clean rows.
    """

    lo: IntArray
    hi: IntArray
    own_start: IntArray
    own_stop: IntArray

    @property
    def num_pairs(self) -> int:
        """Query-key pairs, for one head."""
        return int((self.hi - self.lo).sum() + (self.own_stop - self.own_start).sum())


def visibility(sample: Sample, positions: IntArray, copies: IntArray, mask: Mask) -> Visibility:
    """Return what rows see.

    Args:
        sample: blocks and documents.
        positions: position of each row, int64 [S].
        copies: view of each row, or CLEAN, int64 [S].
        mask: of the layer.
    """
    corrupted, block = copies != CLEAN, sample.block_size
    starts, stops = sample.documents.T
    document = np.maximum(sample.document_of(positions), 0)
    doc_start, doc_stop = starts[document], stops[document]
    block_start = positions // block * block
    block_stop = np.minimum(block_start + block, doc_stop)
    lo, hi = doc_start, np.zeros_like(positions)
    for is_corrupted in (True, False):
        these = corrupted == is_corrupted
        upper = raw_upper(positions, block_start, block_stop, mask, is_corrupted)
        hi = np.where(these, upper, hi)
        if mask.window is not None:
            lower = raw_lower(positions, block_start, mask, is_corrupted)
            lo = np.where(these, np.maximum(doc_start, lower), lo)
    padding = (block_start < doc_start) | (block_start >= doc_stop)
    own_stop = np.where(corrupted & ~padding, block_stop, block_start)
    lo, hi = np.where(padding, 0, lo), np.where(padding, 0, hi)
    return Visibility(np.minimum(lo, hi), hi, block_start, own_stop)


def all_rows(sample: Sample) -> tuple[IntArray, IntArray]:
    """Return positions and copies of every row of a sample, views first, int64 [rows] each."""
    positions, copies = [], []
    offsets = np.arange(sample.block_size)
    for view in sample.views:
        blocks = np.flatnonzero(sample.active_blocks[view])
        positions.append((blocks[:, None] * sample.block_size + offsets).reshape(-1))
        copies.append(np.full(positions[-1].shape, view))
    positions.append(np.arange(sample.length))
    copies.append(np.full(sample.length, CLEAN))
    return np.concatenate(positions), np.concatenate(copies)


def allowed_pairs(sample: Sample, mask: Mask, *, clean_queries: bool = True) -> int:
    """Return the query-key pairs that the mask allows, for one head of one sample, all rows of all copies."""
    positions, copies = all_rows(sample)
    if not clean_queries:
        positions, copies = positions[copies != CLEAN], copies[copies != CLEAN]
    return visibility(sample, positions, copies, mask).num_pairs


def dense_mask(
    sample: Sample,
    mask: Mask,
    queries: tuple[IntArray, IntArray],
    keys: tuple[IntArray, IntArray],
) -> BoolArray:
    """Return who sees whom, bool [query rows, key rows]: for oracles and figures; memory is their product.

    Args:
        sample: blocks and documents.
        mask: of the layer.
        queries: positions and copies of the query rows.
        keys: positions and copies of the key rows.
    """
    seen = visibility(sample, *queries, mask)
    position, copy = keys
    clean = (copy == CLEAN) & (position >= seen.lo[:, None]) & (position < seen.hi[:, None])
    own = (position >= seen.own_start[:, None]) & (position < seen.own_stop[:, None])
    seen_by: BoolArray = clean | (own & (copy == queries[1][:, None]) & (copy != CLEAN))
    return seen_by
