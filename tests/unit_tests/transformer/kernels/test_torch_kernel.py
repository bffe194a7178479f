# SPDX-License-Identifier: Apache-2.0
"""PyTorch's CPU flash attention against the reference kernel, and the reference kernel against autograd.

Shapes: G problems, T rows, U keys, N query heads, K key/value heads, D head dim.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megatron_csbp.transformer.kernels import AttentionKernel
from megatron_csbp.transformer.kernels.reference import ReferenceKernel
from megatron_csbp.transformer.kernels.torch_kernel import TorchCpuKernel

REFERENCE = ReferenceKernel()
SHAPES = {  # problems, rows, keys, query heads, key/value heads, head dim
    "one block": (1, 32, 32, 2, 2, 64),
    "one token": (3, 1, 1, 2, 2, 8),
    "odd": (2, 5, 3, 4, 2, 16),
    "more keys": (1, 48, 137, 4, 4, 32),
    "grouped 8": (2, 33, 65, 8, 1, 16),
    "beyond one tile of the operator": (1, 200, 600, 2, 1, 16),
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


@dataclass(frozen=True)
class Inputs:
    grad_out: Tensor
    query: Tensor
    key: Tensor
    value: Tensor

    def to(self, dtype: torch.dtype) -> "Inputs":
        return Inputs(*(t.to(dtype) for t in (self.grad_out, self.query, self.key, self.value)))


def inputs(shape: tuple[int, ...], *, strided: bool = False, causal: bool = False) -> Inputs:
    """Normal entries in fp64; `strided` gives views of a fused projection in [S, B, heads, D] order."""
    problems, rows, keys, heads, key_heads, head_dim = shape
    keys = rows if causal else keys
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, dtype=torch.float64, generator=generator)

    if not strided:
        query, grad_out = normal(problems, rows, heads, head_dim), normal(problems, rows, heads, head_dim)
        return Inputs(
            grad_out, query, normal(problems, keys, key_heads, head_dim), normal(problems, keys, key_heads, head_dim)
        )
    fused = normal(rows + keys, problems, 2 * heads + 2 * key_heads, head_dim).transpose(0, 1)
    query, grad_out, key, value = fused.split([heads, heads, key_heads, key_heads], dim=2)
    return Inputs(grad_out[:, :rows], query[:, :rows], key[:, rows:], value[:, rows:])


def run(kernel: AttentionKernel, given: Inputs, causal: bool) -> dict[str, Tensor]:
    out, lse = kernel.forward(given.query, given.key, given.value, causal=causal, scale=0.2)
    grads = kernel.backward(given.grad_out, given.query, given.key, given.value, out, lse, causal=causal, scale=0.2)
    return {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv"), grads, strict=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_reference_is_softmax_attention_with_autograds_gradients(shape: tuple[int, ...], causal: bool) -> None:
    given = inputs(shape, causal=causal)
    query, key, value = (t.detach().requires_grad_() for t in (given.query, given.key, given.value))
    expanded = [t.repeat_interleave(query.shape[2] // t.shape[2], 2).transpose(1, 2) for t in (key, value)]
    scores = query.transpose(1, 2) @ expanded[0].transpose(2, 3) * 0.2
    if causal:
        scores = scores + torch.full(scores.shape[-2:], -torch.inf).triu(1)
    out = (scores.softmax(-1) @ expanded[1]).transpose(1, 2)
    grads = torch.autograd.grad(out, (query, key, value), given.grad_out)
    got = run(REFERENCE, given, causal)
    expected = (out, scores.logsumexp(-1).transpose(1, 2), *grads)
    for name, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(got[name], wanted, atol=1e-12, rtol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_torch_agrees_with_the_reference(
    shape: tuple[int, ...], causal: bool, strided: bool, dtype: torch.dtype
) -> None:
    given = inputs(shape, strided=strided, causal=causal)
    expected = run(REFERENCE, given, causal)
    got = run(TorchCpuKernel(), given.to(dtype), causal)
    for name, tensor in got.items():
        assert tensor.dtype is dtype
        assert tensor.shape == expected[name].shape
        error = (tensor.double() - expected[name]).abs().max().item()
        assert error <= TOLERANCE[dtype] * max(1.0, expected[name].abs().max().item()), name


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_torch_in_bf16_errs_at_most_twice_as_much_as_dense_bf16(
    shape: tuple[int, ...], causal: bool, strided: bool
) -> None:
    given = inputs(shape, strided=strided, causal=causal).to(torch.bfloat16)
    exact = run(REFERENCE, given.to(torch.float64), causal)
    dense = run(REFERENCE, given, causal)
    got = run(TorchCpuKernel(), given, causal)
    assert got["lse"].dtype is torch.float32
    for name, tensor in got.items():
        allowed = 2 * (dense[name].double() - exact[name]).abs().max().item()
        assert (tensor.double() - exact[name]).abs().max().item() <= allowed + 1e-6, name


@pytest.mark.parametrize("kernel", [TorchCpuKernel(), REFERENCE], ids=lambda kernel: kernel.name)
def test_backward_with_merged_results_yields_the_tiles_share(kernel: AttentionKernel) -> None:
    whole = inputs((1, 20, 50, 4, 2, 16))
    expected = run(kernel, whole, causal=False)
    shares = []
    for keys in (slice(0, 13), slice(13, 50)):
        key, value = whole.key[:, keys], whole.value[:, keys]
        shares.append(
            kernel.backward(
                whole.grad_out, whole.query, key, value, expected["out"], expected["lse"], causal=False, scale=0.2
            )
        )
    torch.testing.assert_close(shares[0][0] + shares[1][0], expected["dq"], atol=1e-13, rtol=1e-13)
    for index, name in ((1, "dk"), (2, "dv")):
        joined = torch.cat([share[index] for share in shares], dim=1)
        torch.testing.assert_close(joined, expected[name], atol=1e-13, rtol=1e-13)
