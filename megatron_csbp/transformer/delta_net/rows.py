# SPDX-License-Identifier: Apache-2.0
"""The inputs of the gated delta rule, and what a kernel for it has to do.

For every head there is a state S [K, V]. A row decays it, corrects what it holds for the row's key, and reads it:

    S <- exp(log decay) S;   S <- S + beta k (v - S^T k)^T;   out = scale S^T q

So a run of rows maps the state affinely, S -> A S + U.

Shapes: G independent sequences, T rows of a sequence, H heads, K key dim, V value dim, J block starts in a sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class DeltaRows:
    """Rows of independent sequences, ready for the rule.

    Attributes:
        query_GTHK: normalised queries, not scaled.
        key_GTHK: normalised keys.
        value_GTHV: values.
        log_decay_GTH: logarithm of the decay, at most 0, in the accumulation dtype.
        beta_GTH: strength of the write, in (0, 1).
    """

    query_GTHK: Tensor
    key_GTHK: Tensor
    value_GTHV: Tensor
    log_decay_GTH: Tensor
    beta_GTH: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The five tensors, in the order of the attributes."""
        return self.query_GTHK, self.key_GTHK, self.value_GTHV, self.log_decay_GTH, self.beta_GTH

    @property
    def scale(self) -> float:
        """Factor on the output, 1/sqrt(K)."""
        return float(self.key_GTHK.shape[-1] ** -0.5)

    def split(self, sizes: Sequence[int], dim: int) -> list["DeltaRows"]:
        """Return the rows cut along the sequences (dim 0) or along the rows of each (dim 1)."""
        parts = (torch.split(tensor, list(sizes), dim) for tensor in self.tensors)
        return [DeltaRows(*part) for part in zip(*parts, strict=True)]

    def state_shape(self) -> tuple[int, int, int, int]:
        """Return the shape of the states of these sequences, [G, H, K, V]."""
        sequences, _, heads, key_dim = self.key_GTHK.shape
        return sequences, heads, key_dim, self.value_GTHV.shape[-1]


type Keeps = Sequence[Sequence[bool]]
"""For every sequence and every block of it, whether the state of the block before is kept (else a document starts)."""


class DeltaRuleKernel(Protocol):
    """Computes the rule. States are in fp32 (fp64 for fp64 rows); outputs have the dtype of the values.

    Every method is differentiable in the rows and in the states. Blocks are runs of `block_length` rows; sequences
    are whole blocks.
    """

    @property
    def name(self) -> str:
        """What it is, for the start summary."""
        ...

    def state_bytes_of_block(self, block_length: int, key_dim: int, value_dim: int) -> int:
        """Return the bytes of states that `clean` has alive for a block and head."""
        ...

    def clean(
        self, rows: DeltaRows, state_GHKV: Tensor, block_length: int, keeps: Keeps
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the clean copy.

        Args:
            rows: the rows.
            state_GHKV: states at the start.
            block_length: rows of a block.
            keeps: where the state is kept from one block to the next.

        Returns:
            Outputs [G, T, H, V]; the state at the start of every block [G, J, H, K, V]; the state at the end.
        """
        ...

    def blocks(self, rows: DeltaRows, state_GHKV: Tensor) -> Tensor:
        """Run corrupted blocks, each a sequence of its own, from the states at their starts; return [G, T, H, V]."""
        ...

    def advance(self, rows: DeltaRows, map_GHKW: Tensor, block_length: int, keeps: Keeps) -> Tensor:
        """Carry affine maps through the rows.

        Args:
            rows: the rows.
            map_GHKW: maps [U, A] of the rows before, W = V + K; of no rows, U = 0 and A = I.
            block_length: rows of a block.
            keeps: where the state is kept from one block to the next.

        Returns:
            The maps of the rows before and these together, likewise.
        """
        ...


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of states for rows of this dtype."""
    return torch.promote_types(dtype, torch.float32)


def identity_maps(rows: DeltaRows) -> Tensor:
    """Return the affine maps [U, A] of no rows, [G, H, K, V + K]."""
    sequences, heads, key_dim, value_dim = rows.state_shape()
    like = rows.key_GTHK
    eye = torch.eye(key_dim, dtype=state_dtype(like.dtype), device=like.device).expand(sequences, heads, -1, -1)
    return torch.cat([eye.new_zeros(sequences, heads, key_dim, value_dim), eye], -1)
