# SPDX-License-Identifier: Apache-2.0
"""Block-diffusion attention written out over the whole sample, with a full mask: the truth of the attention tests.

Shapes: W = (V+1) L whole rows, view by view and then the clean copy, each by position; B micro-batch, N query heads,
K key/value heads, D head dim, L clean length, V views.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import CLEAN
from megatron_csbp.transformer.geometry.visibility import Mask, dense_mask


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

    def parts(self, num_views: int = 1) -> dict[str, Tensor]:
        """Return the output and the gradients of each kind of copy: eight tensors, six of them gradients."""
        parts = {}
        for field in fields(self):
            whole = getattr(self, field.name)
            clean = whole.shape[0] // (num_views + 1)
            corrupted_part, clean_part = whole[:-clean], whole[-clean:]
            parts |= {f"corrupted {field.name}": corrupted_part, f"clean {field.name}": clean_part}
        return parts

    def max_errors(self, other: "Result", num_views: int = 1) -> dict[str, float]:
        """Return the largest absolute difference in each part."""
        theirs = other.parts(num_views)
        return {
            name: (part.double() - theirs[name].double()).abs().max().item()
            for name, part in self.parts(num_views).items()
        }


def random_problem(
    sequence_length: int,
    *,
    num_query_heads: int,
    num_key_value_heads: int,
    head_dim: int,
    micro_batch_size: int = 1,
    num_views: int = 1,
    seed: int = 0,
) -> Problem:
    """Return a problem in fp64 with normal entries."""
    generator = torch.Generator().manual_seed(seed)
    heads = (num_query_heads, num_key_value_heads, num_key_value_heads, num_query_heads)
    rows = (num_views + 1) * sequence_length
    return Problem(
        *(torch.randn(rows, micro_batch_size, n, head_dim, dtype=torch.float64, generator=generator) for n in heads)
    )


def allowed_mask(sample: Sample, mask: Mask) -> Tensor:
    """Return who sees whom, bool [W, W]."""
    positions = np.tile(np.arange(sample.length), sample.num_views + 1)
    copies = np.repeat([*sample.views, CLEAN], sample.length)
    return torch.from_numpy(dense_mask(sample, mask, (positions, copies), (positions, copies)))


def dense_attention(problem: Problem, sample: Sample, mask: Mask) -> Result:
    """Attend with the full mask, in the dtype of the problem; gradients by autograd. A row without keys gives 0."""
    query, key, value = (t.detach().requires_grad_() for t in (problem.query, problem.key, problem.value))
    group = query.shape[2] // key.shape[2]
    scores_BNWW = torch.einsum("sbnd,ubnd->bnsu", query, key.repeat_interleave(group, 2)) * query.shape[-1] ** -0.5
    mask_WW = allowed_mask(sample, mask)
    sees_W = mask_WW.any(dim=1)
    # A row without keys sees all in the softmax and is cut out afterwards: no NaN on the way.
    weights_BNWW = scores_BNWW.masked_fill(~(mask_WW | ~sees_W[:, None]), -torch.inf).softmax(-1)
    out = torch.einsum("bnsu,ubnd->sbnd", weights_BNWW, value.repeat_interleave(group, 2))
    out = out * sees_W[:, None, None, None]
    return Result(out.detach(), *torch.autograd.grad(out, (query, key, value), problem.grad_out))


def whole_rows(rows: RankRows) -> Tensor:
    """Return the whole row that each local row of a rank is, int64 [S]."""
    sample = rows.sample
    copies = np.where(rows.copies == CLEAN, sample.num_views, rows.copies)
    return torch.from_numpy(rows.sample_positions + copies * sample.length)
