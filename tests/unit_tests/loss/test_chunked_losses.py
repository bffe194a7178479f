# SPDX-License-Identifier: Apache-2.0
"""The gradient of the output weight over chunks: once for its hooks, in fp32, and where Megatron adds it up itself.

Shapes: R rows, H hidden size, V vocabulary.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_csbp.loss.chunked_losses import losses_in_chunks

R, H, V, CHUNK = 256, 8, 32, 4


def tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, weight, targets and the gradient of the losses; every share of the weight's gradient is positive."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(R, 1, H, generator=generator).to(dtype).requires_grad_()
    weight = torch.rand(V, H, generator=generator).to(dtype).requires_grad_()
    return rows, weight, torch.randint(V, (R,), generator=generator), torch.rand(R, generator=generator)


def squares(rows: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return (rows.squeeze(1) @ weight.t()).gather(1, targets[:, None]).squeeze(1).float().square()


def chunked(rows: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return losses_in_chunks(
        lambda rows_r1H, weight_VH, chunk: squares(rows_r1H, weight_VH, targets[chunk]),
        rows,
        weight,
        CHUNK,
        fuses_weight_gradient=False,
        **options,
    )


def test_the_weight_gradient_is_summed_in_fp32() -> None:
    """All rows have one target, so that its row of the weight gets a share from each of 64 chunks."""
    rows, weight, _, upstream = tensors(torch.bfloat16)
    targets = torch.full((R,), 5)
    exact = torch.autograd.grad(squares(rows.double(), weight.double(), targets), weight, upstream)[0].double()
    shares = [
        torch.autograd.grad(squares(rows[first : first + CHUNK], weight, targets[:CHUNK]), weight, upstream[chunk])[0]
        for first in range(0, R, CHUNK)
        for chunk in [slice(first, first + CHUNK)]
    ]
    in_bf16, in_fp32 = torch.zeros_like(weight), torch.zeros(weight.shape)
    for share in shares:
        in_bf16 += share
        in_fp32 += share.float()
    grad = torch.autograd.grad(chunked(rows, weight, targets), weight, upstream)[0]
    assert grad.dtype is torch.bfloat16
    assert torch.equal(grad, in_fp32.bfloat16())

    def error(found: Tensor) -> float:
        return ((found.double() - exact).norm() / exact.norm()).item()

    # What a sum in bf16 would lose is beyond the bound, and the bound is half a unit in the last place.
    assert error(grad) < 4e-3
    assert error(in_bf16) > 6e-3


def test_hooks_of_the_weight_run_once() -> None:
    rows, weight, targets, upstream = tensors(torch.float32)
    calls: list[Tensor] = []
    weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter))
    chunked(rows, weight, targets).backward(upstream)
    assert len(calls) == 1


class Fused(torch.autograd.Function):
    """As Megatron's linear layer does it: the gradient goes to `main_grad`.

    It returns a placeholder if its data-parallel buffers have marked the weight, else nothing.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, returns_placeholder: bool) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.returns_placeholder = returns_placeholder
        return rows.squeeze(1) @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        weight.main_grad += grad_out.t() @ rows.squeeze(1)
        weight.grad_added_to_main_grad = True
        placeholder = torch.full_like(weight, torch.nan) if ctx.returns_placeholder else None
        return (grad_out @ weight).unsqueeze(1), placeholder, None


@pytest.mark.parametrize("returns_placeholder", [True, False])
def test_a_fused_gradient_is_added_by_each_chunk_and_its_placeholder_returned_once(returns_placeholder: bool) -> None:
    rows, weight, targets, upstream = tensors(torch.float32)
    expected_rows, expected = torch.autograd.grad(squares(rows, weight, targets), (rows, weight), upstream)
    weight.main_grad = torch.zeros(V, H)  # type: ignore[attr-defined]
    losses = losses_in_chunks(
        lambda rows_r1H, weight_VH, chunk: (
            Fused.apply(rows_r1H, weight_VH, returns_placeholder).gather(1, targets[chunk, None]).squeeze(1).square()
        ),
        rows,
        weight,
        CHUNK,
        fuses_weight_gradient=True,
    )
    losses.backward(upstream)
    torch.testing.assert_close(weight.main_grad, expected)  # type: ignore[attr-defined]
    assert rows.grad is not None
    torch.testing.assert_close(rows.grad, expected_rows)
    assert weight.grad_added_to_main_grad  # type: ignore[attr-defined]
    # Megatron's hooks need a gradient to run, whatever its value.
    assert (weight.grad is not None) == returns_placeholder


@pytest.mark.parametrize("frozen", [False, True])
def test_a_frozen_weight_gets_no_gradient(frozen: bool) -> None:
    rows, weight, targets, upstream = tensors(torch.float32)
    weight.requires_grad_(not frozen)
    chunked(rows, weight, targets).backward(upstream)
    assert (weight.grad is None) == frozen
    assert rows.grad is not None
