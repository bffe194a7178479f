# SPDX-License-Identifier: Apache-2.0
"""Attention written out with a full score matrix: the yardstick of the tests. Memory grows with T x U.

Shapes: G independent problems of one tile, T rows, U keys, N query heads, K key/value heads, D head dim.
"""

import torch
from torch import Tensor


class ReferenceKernel:
    """Dense attention in the input dtype, forward and backward from the textbook formulas."""

    name = "reference"

    def forward(
        self, query_GTND: Tensor, key_GUKD: Tensor, value_GUKD: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionKernel.forward`."""
        scores_GNTU = _scores(query_GTND, key_GUKD, causal, scale)
        lse_GNT = torch.logsumexp(scores_GNTU, dim=-1)
        weights_GNTU = torch.exp(scores_GNTU - lse_GNT.unsqueeze(-1))
        out_GTND = torch.einsum("gntu,gund->gtnd", weights_GNTU, _expand(value_GUKD, query_GTND))
        return out_GTND, lse_GNT.transpose(1, 2)

    def backward(
        self,
        grad_out_GTND: Tensor,
        query_GTND: Tensor,
        key_GUKD: Tensor,
        value_GUKD: Tensor,
        out_GTND: Tensor,
        lse_GTN: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `AttentionKernel.backward`."""
        key_GUND, value_GUND = _expand(key_GUKD, query_GTND), _expand(value_GUKD, query_GTND)
        lse_GNT1 = lse_GTN.transpose(1, 2).unsqueeze(-1).to(query_GTND.dtype)
        weights_GNTU = torch.exp(_scores(query_GTND, key_GUKD, causal, scale) - lse_GNT1)
        grad_value_GUND = torch.einsum("gntu,gtnd->gund", weights_GNTU, grad_out_GTND)
        grad_weights_GNTU = torch.einsum("gtnd,gund->gntu", grad_out_GTND, value_GUND)
        delta_GNT1 = (grad_out_GTND * out_GTND).sum(-1).transpose(1, 2).unsqueeze(-1)
        grad_scores_GNTU = weights_GNTU * (grad_weights_GNTU - delta_GNT1) * scale
        grad_query_GTND = torch.einsum("gntu,gund->gtnd", grad_scores_GNTU, key_GUND)
        grad_key_GUND = torch.einsum("gntu,gtnd->gund", grad_scores_GNTU, query_GTND)
        return grad_query_GTND, _reduce(grad_key_GUND, key_GUKD), _reduce(grad_value_GUND, value_GUKD)


def _scores(query_GTND: Tensor, key_GUKD: Tensor, causal: bool, scale: float) -> Tensor:
    scores_GNTU = torch.einsum("gtnd,gund->gntu", query_GTND, _expand(key_GUKD, query_GTND)) * scale
    if causal:
        later_TU = torch.ones(scores_GNTU.shape[-2:], dtype=torch.bool, device=scores_GNTU.device).triu(1)
        scores_GNTU = scores_GNTU.masked_fill(later_TU, -torch.inf)
    return scores_GNTU


def _expand(key_GUKD: Tensor, query_GTND: Tensor) -> Tensor:
    """Repeat each key/value head for the query heads that share it."""
    return key_GUKD.repeat_interleave(query_GTND.shape[2] // key_GUKD.shape[2], dim=2)


def _reduce(grad_GUND: Tensor, key_GUKD: Tensor) -> Tensor:
    """Sum the gradients of the query heads that share a key/value head."""
    *problems, _, head_dim = grad_GUND.shape
    return grad_GUND.reshape(*problems, key_GUKD.shape[2], -1, head_dim).sum(3)
