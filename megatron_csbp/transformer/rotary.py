# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings by true position: all copies of a token are rotated by its position in its document.

Megatron's RoPE and YaRN ignore position ids and slice their table for a zigzag of one copy. Here the whole table of L
positions is built by Megatron's own `get_emb` and indexed by the positions of the rows.
"""

from typing import Any

import torch
from torch import Tensor, nn

from megatron_csbp.transformer.geometry.rows import RankRows


class RowRotaryEmbedding(nn.Module):
    """Stands in for a model's `rotary_pos_emb` (RoPE, YaRN, partial or interleaved; fused or not)."""

    def __init__(self, rotary: Any, rows: RankRows) -> None:
        """Wrap a rotary embedding.

        Args:
            rotary: Megatron's rotary embedding, with `get_emb`.
            rows: this rank's rows of a sample that has no geometry of its own.
        """
        super().__init__()
        self.rotary = rotary
        self._static_rows = rows
        self._rows: RankRows | None = None
        self._static_angles: Any = None

    def use(self, rows: RankRows | None) -> None:
        """Take the rows of the call that comes; None for those of every sample.

        GPTModel hands over the length only, and asks once a call, before the first layer.
        """
        self._rows = rows

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        """Return L: the table's length does not depend on the transformer's input."""
        return self._static_rows.sample.length

    def forward(self, max_seq_len: int, **kwargs: Any) -> Any:
        """Return Megatron's angles for the rows of this rank, [S, 1, 1, rotary dims]; with YaRN also its scale factor.

        Args:
            max_seq_len: L.
            **kwargs: Megatron's `packed_seq` (must be False) and `cp_group` (the rows are a rank's own already).

        Raises:
            ValueError: packed sequences.
        """
        if kwargs.get("packed_seq"):
            raise ValueError("block-diffusion training takes no packed sequences; positions come from its plan.")
        if self._rows is not None:
            return self._angles(max_seq_len, self._rows)
        if self._static_angles is None:
            self._static_angles = self._angles(max_seq_len, self._static_rows)
        return self._static_angles

    def _angles(self, length: int, rows: RankRows) -> Any:
        table = self.rotary.get_emb(length)
        scaled = isinstance(table, tuple)
        angles: Tensor = table[0] if scaled else table
        of_rows = angles[torch.from_numpy(rows.positions).to(angles.device, non_blocking=True)]
        return (of_rows, *table[1:]) if scaled else of_rows
