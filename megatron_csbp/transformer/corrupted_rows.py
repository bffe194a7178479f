# SPDX-License-Identifier: Apache-2.0
"""The corrupted rows of a rank on their own, and back among the clean ones.

Shapes: S local rows, V corrupted ones among them; with sequence parallelism each tensor-parallel rank holds an equal
run of either.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region
from torch import Tensor

from megatron_csbp.transformer.layout import SequenceLayout, Stream


def corrupted_rows(tensor_S: Tensor, layout: SequenceLayout) -> Tensor:
    """Return the corrupted rows [V, ...] of local rows [S, ...], in order."""
    return torch.cat(
        [tensor_S.narrow(0, s.first_row, s.length) for s in layout.segments if s.stream is Stream.CORRUPTED]
    )


def among_all_rows(tensor_V: Tensor, layout: SequenceLayout) -> Tensor:
    """Return local rows [S, ...] with these corrupted ones [V, ...] and zeros for the clean ones."""
    pieces, taken = [], 0
    for segment in layout.segments:
        if segment.stream is Stream.CORRUPTED:
            pieces.append(tensor_V.narrow(0, taken, segment.length))
            taken += segment.length
        else:
            pieces.append(tensor_V.new_zeros(segment.length, *tensor_V.shape[1:]))
    return torch.cat(pieces)


@dataclass(frozen=True, eq=False)
class CorruptedRows:
    """Takes corrupted rows out of hidden states and puts them back.

    Attributes:
        layout: the rank's rows.
        tensor_parallel_group: over which rows are split if `sequence_parallel`.
        sequence_parallel: whether each tensor-parallel rank holds a part of the rows.
    """

    layout: SequenceLayout
    tensor_parallel_group: Any
    sequence_parallel: bool

    def take(self, hidden_SBH: Tensor) -> Tensor:
        """Return the corrupted rows of hidden states."""
        return self._scatter(corrupted_rows(self._gather(hidden_SBH), self.layout))

    def put(self, hidden_VBH: Tensor) -> Tensor:
        """Return hidden states with these corrupted rows and zeros for the clean ones."""
        return self._scatter(among_all_rows(self._gather(hidden_VBH), self.layout))

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
