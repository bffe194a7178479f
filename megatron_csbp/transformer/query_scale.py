# SPDX-License-Identifier: Apache-2.0
"""Queries scaled by their true position, as Llama 4 and Nemotron-Labs-Diffusion (Ministral 3) do for long texts.

Position p of a model that was first trained on T positions has the scale 1 + beta ln(1 + floor(p / T)): exactly 1
below T. Both copies of a position have the same scale. Computed in fp32, after the position embedding.

Shapes: S local rows, B micro-batch, N query heads, D head dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class QueryScale:
    """The scale of queries by position.

    Attributes:
        beta: slope, above 0; 0.1 in the published models.
        original_length: T, 16,384 in the published models.
    """

    beta: float
    original_length: int

    def factors(self, positions_S: Tensor) -> Tensor:
        """Return the scale at integer positions, fp32 [S]."""
        rounds_S = torch.div(positions_S, self.original_length, rounding_mode="floor")
        return 1.0 + self.beta * torch.log1p(rounds_S.to(torch.float32))

    def __call__(self, query_SBND: Tensor, positions_S: Tensor) -> Tensor:
        """Return the scaled queries, in their own dtype."""
        factors_S111 = self.factors(positions_S.to(query_SBND.device)).view(-1, 1, 1, 1)
        return (query_SBND * factors_S111).to(query_SBND.dtype)


def query_scale(beta: float | None, original_length: int | None) -> QueryScale | None:
    """Return the scale of the flags; None where they ask for none.

    Args:
        beta: `--query-scale-beta`.
        original_length: `--yarn-original-max-position-embeddings`.
    """
    if not beta:
        return None
    assert original_length is not None, "a rule of the arguments"
    return QueryScale(beta, original_length)
