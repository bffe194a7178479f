# SPDX-License-Identifier: Apache-2.0
"""The short causal convolution of delta-net layers, over chunks of the clean copy and over corrupted blocks.

A row looks back on the clean rows before it, for a corrupted block those before its start, and never into another
document.

Shapes: S local rows, C rows of a chunk, n blocks of one length M, B micro-batch, X channels, R rows that the
convolution looks back, c chunks of this rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_csbp.transformer.delta_net.exchange import ChunkExchange, rows_before_chunks
from megatron_csbp.transformer.delta_net.plan import CorruptedBlock, DeltaNetPlan


@dataclass(frozen=True)
class ShortConvolution:
    """Weights of a depthwise causal convolution with SiLU.

    Attributes:
        weight_XR: taps of each channel, the last one for the row itself, [X, R + 1].
        bias_X: added before SiLU, or None.
    """

    weight_XR: Tensor
    bias_X: Tensor | None = None

    @property
    def look_back(self) -> int:
        """R."""
        return self.weight_XR.shape[1] - 1

    def __call__(self, rows_GTBX: Tensor) -> Tensor:
        """Convolve G runs of rows, the first R of which have no output: [G, R + T, B, X] to [G, T, B, X]."""
        sequences, _, batch, channels = rows_GTBX.shape
        rows_EXT = rows_GTBX.permute(0, 2, 3, 1).flatten(0, 1)
        out_EXT = F.silu(F.conv1d(rows_EXT, self.weight_XR[:, None], self.bias_X, groups=channels))
        return out_EXT.view(sequences, batch, channels, -1).permute(0, 3, 1, 2)


def with_rows_before(rows_cCBX: Tensor, look_back: int, plan: DeltaNetPlan, exchange: ChunkExchange | None) -> Tensor:
    """Return the rows of this rank's chunks with the R rows before each of them, [c, R + C, B, X]."""
    if plan.exchanges:
        assert exchange is not None, "this plan needs an exchange"
        before_cRBX = rows_before_chunks(rows_cCBX, look_back, plan, exchange)
    else:
        before_cRBX = rows_cCBX.new_zeros(rows_cCBX.shape[0], look_back, *rows_cCBX.shape[2:])
    return torch.cat([before_cRBX, rows_cCBX], 1)


def convolve_chunks(extended_cTBX: Tensor, convolution: ShortConvolution, plan: DeltaNetPlan) -> Tensor:
    """Return the convolved rows of this rank's chunks, [c, C, B, X].

    Args:
        extended_cTBX: the chunks with the R rows before them, T = R + C.
        convolution: the weights.
        plan: the rank's chunks and their documents.
    """
    look_back = convolution.look_back
    if plan.is_one_document:
        return convolution(extended_cTBX)
    convolved = []
    for chunk, extended_TBX in zip(plan.chunks, extended_cTBX, strict=True):
        pieces = []
        for start, length in plan.pieces(chunk):
            rows_TBX = extended_TBX.narrow(0, start - chunk.start, look_back + length)
            missing = look_back - plan.rows_before(chunk, start, look_back)
            if missing:
                rows_TBX = torch.cat([torch.zeros_like(rows_TBX[:missing]), rows_TBX[missing:]])
            pieces.append(convolution(rows_TBX[None])[0])
        convolved.append(torch.cat(pieces))
    return torch.stack(convolved)


def convolve_blocks(
    rows_nMBX: Tensor,
    blocks: Sequence[CorruptedBlock],
    extended_cTBX: Tensor,
    convolution: ShortConvolution,
    plan: DeltaNetPlan,
) -> Tensor:
    """Return the convolved rows of corrupted blocks of one length, [n, M, B, X].

    Args:
        rows_nMBX: rows of the blocks.
        blocks: the blocks.
        extended_cTBX: the rank's clean chunks with the R rows before them.
        convolution: the weights.
        plan: the rank's plan.
    """
    look_back, length = convolution.look_back, extended_cTBX.shape[1]
    first, missing = [], []
    for block in blocks:
        index = plan.chunk_of(block)
        chunk = plan.chunks[index]
        first.append(index * length + block.start - chunk.start)
        missing.append(look_back - plan.rows_before(chunk, block.start, look_back))
    steps = torch.arange(look_back, device=rows_nMBX.device)
    index_nR = torch.tensor(first, device=rows_nMBX.device)[:, None] + steps
    before_nRBX = torch.unflatten(extended_cTBX.flatten(0, 1)[index_nR.flatten()], 0, index_nR.shape)
    if any(missing):
        other_nR = steps < torch.tensor(missing, device=rows_nMBX.device)[:, None]
        before_nRBX = before_nRBX.masked_fill(other_nR[:, :, None, None], 0)
    return convolution(torch.cat([before_nRBX, rows_nMBX], 1))
