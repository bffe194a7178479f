# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings by true position: both copies of position i are rotated by i.

Megatron's RoPE and YaRN ignore position ids and slice their table for a zigzag of one copy. Here the whole table of L
positions is built by Megatron's own `get_emb` and indexed by the rows of the layout.
"""

from typing import Any

import torch
from torch import Tensor, nn

from megatron_csbp.transformer.layout import SequenceLayout


class LayoutRotaryEmbedding(nn.Module):
    """Stands in for a model's `rotary_pos_emb` (RoPE, YaRN, partial or interleaved; fused or not)."""

    def __init__(self, rotary: Any, layout: SequenceLayout) -> None:
        """Wrap a rotary embedding.

        Args:
            rotary: Megatron's rotary embedding, with `get_emb`.
            layout: the rows of this rank.
        """
        super().__init__()
        self.rotary = rotary
        self._layout = layout
        self._rows: Any = None

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        """Return L: the table's length does not depend on the transformer's input."""
        return self._layout.sequence_length

    def forward(self, max_seq_len: int, **kwargs: Any) -> Any:
        """Return Megatron's angles for the rows of this rank, [S, 1, 1, rotary dims]; with YaRN also its scale factor.

        Args:
            max_seq_len: L.
            **kwargs: Megatron's `packed_seq` (must be False) and `cp_group` (the layout has sliced already).

        Raises:
            ValueError: packed sequences.
        """
        if kwargs.get("packed_seq"):
            raise ValueError("block-diffusion training takes no packed sequences; positions come from its layout.")
        if self._rows is None:
            table = self.rotary.get_emb(max_seq_len)
            scaled = isinstance(table, tuple)
            angles: Tensor = table[0] if scaled else table
            rows = angles[torch.from_numpy(self._layout.positions).to(angles.device)]
            self._rows = (rows, *table[1:]) if scaled else rows
        return self._rows
