# SPDX-License-Identifier: Apache-2.0
"""Losses of rows a chunk at a time: what a chunk needs on the way is dropped, and computed again in backward.

`torch.utils.checkpoint` is not the way to it. Its non-reentrant kind hands a detached weight to the backward pass, on
which Megatron's fused weight gradient does not find what it looks for; its reentrant kind runs the gradient hooks of
the weight once for each chunk, and Megatron takes the first time for the last. Both add gradients up in the dtype of
the weight.

Shapes: R rows, H hidden size, V vocabulary on this tensor-parallel rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_csbp.transformer.softmax_merge import accumulation_dtype

type ChunkLosses = Callable[[Tensor, Tensor, slice], Tensor]
"""Losses [r] of some rows [r, 1, H] with the weight [V, H]; the slice says which rows."""


def losses_in_chunks(
    losses_of: ChunkLosses, rows_R1H: Tensor, weight_VH: Tensor, chunk_rows: int, *, fuses_weight_gradient: bool
) -> Tensor:
    """Return the losses of all rows, [R].

    Args:
        losses_of: computes a chunk; called once in the forward and once in the backward pass for each.
        rows_R1H: hidden states.
        weight_VH: weight of the output layer.
        chunk_rows: rows in a chunk.
        fuses_weight_gradient: whether `losses_of` adds the weight's gradient to its `main_grad` by itself, and what
            autograd returns for it means nothing.
    """
    losses_R: Tensor = _ChunkedLosses.apply(rows_R1H, weight_VH, losses_of, chunk_rows, fuses_weight_gradient)
    return losses_R


class _ChunkedLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_R1H: Tensor, weight_VH: Tensor, losses_of: ChunkLosses, chunk_rows: int, fuses: bool
    ) -> Tensor:
        ctx.save_for_backward(rows_R1H, weight_VH)
        ctx.losses_of, ctx.fuses = losses_of, fuses
        count = rows_R1H.shape[0]
        ctx.chunks = [slice(first, min(first + chunk_rows, count)) for first in range(0, count, chunk_rows)]
        return torch.cat([losses_of(rows_R1H[chunk], weight_VH, chunk) for chunk in ctx.chunks])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses_R: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        rows_R1H, weight_VH = ctx.saved_tensors
        grad_rows_R1H = torch.empty_like(rows_R1H)
        weight_grad = _WeightGradient(weight_VH, fused=ctx.fuses)
        for chunk in ctx.chunks:
            with torch.enable_grad():
                rows_r1H = rows_R1H[chunk].detach().requires_grad_()
                losses_r = ctx.losses_of(rows_r1H, weight_VH, chunk)
            wanted = (rows_r1H, weight_VH) if weight_VH.requires_grad else (rows_r1H,)
            grad_rows_r1H, *of_weight = torch.autograd.grad(losses_r, wanted, grad_losses_R[chunk], allow_unused=True)
            grad_rows_R1H[chunk] = grad_rows_r1H
            weight_grad.add(*of_weight)
        return grad_rows_R1H, weight_grad.total(), None, None, None


class _WeightGradient:
    """The sum over chunks, in fp32; or, where Megatron has added each to `main_grad`, its placeholder as it is."""

    def __init__(self, weight_VH: Tensor, *, fused: bool) -> None:
        self._weight = weight_VH
        self._fused = fused
        self._sum: Tensor | None = None

    def add(self, grad_VH: Tensor | None = None) -> None:
        if grad_VH is None:
            return
        if self._fused:
            self._sum = grad_VH
        elif self._sum is None:
            self._sum = grad_VH.to(accumulation_dtype(grad_VH.dtype))
        else:
            self._sum += grad_VH

    def total(self) -> Tensor | None:
        return None if self._sum is None else self._sum.to(self._weight.dtype)
