# SPDX-License-Identifier: Apache-2.0
"""The corrupted rows of a rank on their own, and back among the clean ones.

Shapes: S local rows, V corrupted ones among them, of all views; with sequence parallelism each tensor-parallel rank
holds an equal run of either.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region
from torch import Tensor

from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.scheme import CLEAN


def corrupted_rows(tensor_S: Tensor, rows: RankRows) -> Tensor:
    """Return the corrupted rows [V, ...] of local rows [S, ...], in order.

    Where a rank holds none, one block of clean rows stands in: Megatron's layers take no tensors without rows.
    """
    kept = [tensor_S.narrow(0, row, length) for row, length, corrupted in _runs(rows) if corrupted]
    return torch.cat(kept) if kept else tensor_S[: rows.sample.block_size]


def among_all_rows(tensor_V: Tensor, rows: RankRows) -> Tensor:
    """Return local rows [S, ...] with these corrupted ones [V, ...] and zeros for the clean ones."""
    pieces, taken = [], 0
    for _, length, corrupted in _runs(rows):
        if corrupted:
            pieces.append(tensor_V.narrow(0, taken, length))
            taken += length
        else:
            pieces.append(tensor_V.new_zeros(length, *tensor_V.shape[1:]))
    # Nothing of the stand-in, but a tie to it: the layer's parameters get gradients on every rank.
    pieces.append(tensor_V[:0])
    return torch.cat(pieces)


def _runs(rows: RankRows) -> list[tuple[int, int, bool]]:
    """Return (first row, rows, whether corrupted) of the local rows, as few runs as there are."""
    runs: list[tuple[int, int, bool]] = []
    for span in rows.spans:
        corrupted = span.copy != CLEAN
        if runs and runs[-1][2] == corrupted:
            runs[-1] = (runs[-1][0], runs[-1][1] + span.length, corrupted)
        else:
            runs.append((span.first_row, span.length, corrupted))
    return runs


@dataclass(eq=False)
class CorruptedRows:
    """Takes corrupted rows out of hidden states and puts them back.

    Attributes:
        rows: the rank's rows in the call under way.
        tensor_parallel_group: over which rows are split if `sequence_parallel`.
        sequence_parallel: whether each tensor-parallel rank holds a part of the rows.
    """

    rows: RankRows
    tensor_parallel_group: Any
    sequence_parallel: bool

    def take(self, hidden_SBH: Tensor) -> Tensor:
        """Return the corrupted rows of hidden states."""
        return self._scatter(corrupted_rows(self._gather(hidden_SBH), self.rows))

    def put(self, hidden_VBH: Tensor) -> Tensor:
        """Return hidden states with these corrupted rows and zeros for the clean ones."""
        return self._scatter(among_all_rows(self._gather(hidden_VBH), self.rows))

    def _gather(self, hidden_SBH: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return hidden_SBH
        # What follows is the same on every tensor-parallel rank, and so is its gradient: each takes its own part.
        whole_SBH: Tensor = gather_from_sequence_parallel_region(
            hidden_SBH, tensor_parallel_output_grad=False, group=self.tensor_parallel_group
        )
        return whole_SBH

    def _scatter(self, hidden_SBH: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return hidden_SBH
        part_SBH: Tensor = scatter_to_sequence_parallel_region(hidden_SBH, group=self.tensor_parallel_group)
        return part_SBH
