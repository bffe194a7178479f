# SPDX-License-Identifier: Apache-2.0
"""Block-diffusion attention written out over the whole sequence, with a full mask: the truth of the attention tests.

Shapes: W = 2L whole rows, the corrupted copy first and then the clean copy, both by position; B micro-batch, N query
heads, K key/value heads, D head dim, L clean length.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from megatron_csbp.transformer.attention_plan import CleanAttention
from megatron_csbp.transformer.layout import SequenceLayout


@dataclass(frozen=True)
class Problem:
    """Queries [W, B, N, D], keys and values [W, B, K, D], and the gradient of the output [W, B, N, D]."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor

    def to(self, dtype: torch.dtype) -> "Problem":
        return Problem(*(getattr(self, field.name).to(dtype) for field in fields(self)))


@dataclass(frozen=True)
class Result:
    """Output [W, B, N, D] and gradients of query, key and value."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor

    def parts(self) -> dict[str, Tensor]:
        """Return the output and the gradients of each copy on its own: eight tensors, six of them gradients."""
        parts = {}
        for field in fields(self):
            corrupted, clean = getattr(self, field.name).chunk(2)
            parts |= {f"corrupted {field.name}": corrupted, f"clean {field.name}": clean}
        return parts

    def max_errors(self, other: "Result") -> dict[str, float]:
        """Return the largest absolute difference in each part."""
        theirs = other.parts()
        return {
            name: (part.double() - theirs[name].double()).abs().max().item() for name, part in self.parts().items()
        }


def random_problem(
    sequence_length: int,
    *,
    num_query_heads: int,
    num_key_value_heads: int,
    head_dim: int,
    micro_batch_size: int = 1,
    seed: int = 0,
) -> Problem:
    """Return a problem in fp64 with normal entries."""
    generator = torch.Generator().manual_seed(seed)
    heads = (num_query_heads, num_key_value_heads, num_key_value_heads, num_query_heads)
    return Problem(
        *(
            torch.randn(2 * sequence_length, micro_batch_size, n, head_dim, dtype=torch.float64, generator=generator)
            for n in heads
        )
    )


def allowed_mask(sequence_length: int, block_size: int, clean_attention: CleanAttention) -> Tensor:
    """Return who sees whom, bool [W, W]: straight from the definition of the block-diffusion mask."""
    position = torch.arange(sequence_length)
    block = position // block_size
    corrupted_corrupted = block[:, None] == block
    corrupted_clean = block[:, None] > block
    clean_clean = block[:, None] >= block
    if clean_attention is CleanAttention.TOKEN_CAUSAL:
        clean_clean = position[:, None] >= position
    upper = torch.cat([corrupted_corrupted, corrupted_clean], dim=1)
    lower = torch.cat([torch.zeros_like(clean_clean), clean_clean], dim=1)
    return torch.cat([upper, lower])


def dense_attention(problem: Problem, block_size: int, clean_attention: CleanAttention) -> Result:
    """Attend with the full mask, in the dtype of the problem; gradients by autograd."""
    query, key, value = (t.detach().requires_grad_() for t in (problem.query, problem.key, problem.value))
    group = query.shape[2] // key.shape[2]
    scores_BNWW = torch.einsum("sbnd,ubnd->bnsu", query, key.repeat_interleave(group, 2)) * query.shape[-1] ** -0.5
    mask_WW = allowed_mask(query.shape[0] // 2, block_size, clean_attention)
    weights_BNWW = scores_BNWW.masked_fill(~mask_WW, -torch.inf).softmax(-1)
    out = torch.einsum("bnsu,ubnd->sbnd", weights_BNWW, value.repeat_interleave(group, 2))
    return Result(out.detach(), *torch.autograd.grad(out, (query, key, value), problem.grad_out))


def whole_rows(layout: SequenceLayout) -> Tensor:
    """Return the whole row that each local row of a rank is, int64 [S]."""
    return torch.from_numpy(layout.positions + np.where(layout.is_corrupted, 0, layout.sequence_length))
