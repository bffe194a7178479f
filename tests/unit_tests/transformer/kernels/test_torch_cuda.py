# SPDX-License-Identifier: Apache-2.0
"""PyTorch's CUDA operators on a CPU: their real schemas, over implementations that this file registers for the CPU.

The dispatcher leaves out arguments that have their default value, hence the defaults of the implementations.

Shapes: G problems, T rows, U keys, N query heads, K key/value heads, D head dim.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_csbp.transformer.geometry.scheme import Scheme
from megatron_csbp.transformer.kernels import HeadShape, torch_cuda
from megatron_csbp.transformer.kernels.reference import ReferenceKernel
from megatron_csbp.transformer.kernels.self_test import check_kernel
from megatron_csbp.transformer.kernels.torch_cuda import TorchCudaKernel, choose_operator
from tests.support.attention_cases import Case, attend_on_group
from tests.support.simulated_group import SimulatedCollectives

aten = torch.ops.aten
OPERATORS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)


@dataclass
class Operators:
    """CPU implementations of the CUDA operators, and what they were called with.

    Attributes:
        choice: what PyTorch's selector says.
        cudnn_lse_dims: dims of cuDNN's log-sum-exp, which differ by version.
        calls: names of the operators, in order.
        masks: the same, with whether the mask is causal.
    """

    choice: SDPBackend = SDPBackend.FLASH_ATTENTION
    cudnn_lse_dims: int = 4
    calls: list[str] = field(default_factory=list)
    masks: list[tuple[str, bool]] = field(default_factory=list)

    def flash(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        p: float = 0.0,
        causal: bool = False,
        debug: bool = False,
        *,
        scale: float | None = None,
    ) -> Any:
        self._note("flash", causal)
        assert (p, debug) == (0.0, False)
        out, lse = self._attend(q, k, v, causal, scale)
        state = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
        return out, lse, None, None, q.shape[2], k.shape[2], *state, q.new_empty(0)

    def flash_backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        p: float,
        causal: bool,
        seed: Tensor,
        offset: Tensor,
        *,
        scale: float | None = None,
    ) -> Any:
        self._note("flash backward", causal)
        # A defined length tensor would turn the operator to its variable-length form.
        assert cum_seq_q is None
        assert cum_seq_k is None
        assert {seed.dtype, offset.dtype} == {torch.uint64}
        assert (seed.shape, offset.shape) == ((2,), ())  # as the forward pass gives them
        assert (max_q, max_k, p) == (q.shape[2], k.shape[2], 0.0)
        return self._differentiate(grad, q, k, v, out, lse, causal, scale)

    def cudnn(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        lse: bool,
        p: float = 0.0,
        causal: bool = False,
        debug: bool = False,
        *,
        scale: float | None = None,
    ) -> Any:
        self._note("cudnn", causal)
        assert (bias, lse, p, debug) == (None, True, 0.0, False)
        out, lse_GNT = self._attend(q, k, v, causal, scale)
        statistics = lse_GNT.unsqueeze(-1) if self.cudnn_lse_dims == 4 else lse_GNT
        state = torch.zeros((), dtype=torch.int64)
        return out, statistics, None, None, q.shape[2], k.shape[2], state, state.clone(), None

    def cudnn_backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        seed: Tensor,
        offset: Tensor,
        bias: Tensor | None,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        p: float,
        causal: bool,
        *,
        scale: float | None = None,
    ) -> Any:
        self._note("cudnn backward", causal)
        assert (bias, cum_seq_q, cum_seq_k) == (None, None, None)
        assert {seed.dtype, offset.dtype} == {torch.int64}
        assert (seed.shape, offset.shape) == ((), ())
        assert (max_q, max_k, p, lse.dim()) == (q.shape[2], k.shape[2], 0.0, self.cudnn_lse_dims)
        return self._differentiate(grad, q, k, v, out, lse.reshape(q.shape[:3]), causal, scale)

    def _note(self, name: str, causal: bool) -> None:
        self.calls.append(name)
        self.masks.append((name, causal))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)

    def _differentiate(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float | None,
    ) -> Any:
        assert lse.is_contiguous(), "the operator reads raw memory"
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[Operators]:
    """The dispatcher checks every call against PyTorch's own schema before it reaches an implementation."""
    operators = Operators()
    library = torch.library.Library("aten", "IMPL")
    for name, implementation in {
        "_scaled_dot_product_flash_attention": operators.flash,
        "_scaled_dot_product_flash_attention_backward": operators.flash_backward,
        "_scaled_dot_product_cudnn_attention": operators.cudnn,
        "_scaled_dot_product_cudnn_attention_backward": operators.cudnn_backward,
    }.items():
        library.impl(name, implementation, "CPU")
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *args, **kwargs: operators.choice.value)
    yield operators
    library._destroy()


def inputs(*, causal: bool, strided: bool) -> list[Tensor]:
    """Gradient of the output, query, key and value in fp64 for G = 3, T = 5, N = 4, K = 2, D = 8."""
    generator = torch.Generator().manual_seed(0)
    keys = 5 if causal else 7
    shapes = [(3, 5, 4, 8), (3, 5, 4, 8), (3, keys, 2, 8), (3, keys, 2, 8)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [t.transpose(0, 1).contiguous().transpose(0, 1) for t in tensors] if strided else tensors


@pytest.mark.parametrize("lse_dims", [3, 4])
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("choice", OPERATORS, ids=lambda choice: choice.name)
def test_both_operators_give_the_reference(
    choice: SDPBackend, causal: bool, strided: bool, lse_dims: int, operators: Operators
) -> None:
    operators.choice, operators.cudnn_lse_dims = choice, lse_dims
    grad_out, *tensors = inputs(causal=causal, strided=strided)
    results = []
    for kernel in (TorchCudaKernel(), ReferenceKernel()):
        out, lse = kernel.forward(*tensors, causal=causal, scale=0.3)
        results.append((out, lse, *kernel.backward(grad_out, *tensors, out, lse, causal=causal, scale=0.3)))
    for name, got, expected in zip(("out", "lse", "dq", "dk", "dv"), *results, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-13, rtol=1e-13, msg=lambda m, n=name: f"{n}: {m}")
    name = {SDPBackend.FLASH_ATTENTION: "flash", SDPBackend.CUDNN_ATTENTION: "cudnn"}[choice]
    assert operators.calls == [name, f"{name} backward"]


def test_the_self_test_tries_both_operators(operators: Operators, monkeypatch: pytest.MonkeyPatch) -> None:
    operators.choice = SDPBackend.CUDNN_ATTENTION
    monkeypatch.setattr(torch_cuda, "can_use_flash_attention", lambda params: True)
    check_kernel(TorchCudaKernel(), torch.device("cpu"), torch.bfloat16, HeadShape(4, 2, 16))
    asked = {(name, causal) for name in ("flash", "cudnn") for causal in (False, True)}
    assert set(operators.masks) == asked | {(f"{name} backward", causal) for name, causal in asked}


@pytest.mark.parametrize("problems", [2, 5, 9])
def test_batches_that_overflow_an_index_are_cut(
    problems: int, operators: Operators, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_cuda, "CUDNN_PROBLEMS", 4)
    monkeypatch.setattr(torch_cuda, "flash_problems", lambda rows, heads, head_dim: 2)
    grad_out, *tensors = (tensor.repeat(3, 1, 1, 1)[:problems] for tensor in inputs(causal=False, strided=True))
    expected = ReferenceKernel().forward(*tensors, causal=False, scale=0.3)
    expected += ReferenceKernel().backward(grad_out, *tensors, *expected, causal=False, scale=0.3)
    for choice, calls in zip(OPERATORS, (-(-problems // 2), -(-problems // 4)), strict=True):
        operators.choice = choice
        operators.calls.clear()
        out, lse = TorchCudaKernel().forward(*tensors, causal=False, scale=0.3)
        got = (out, lse, *TorchCudaKernel().backward(grad_out, *tensors, out, lse, causal=False, scale=0.3))
        torch.testing.assert_close(got, expected, atol=1e-13, rtol=1e-13)
        assert sum(call.endswith("backward") for call in operators.calls) == calls


@pytest.mark.parametrize(
    "choice, problems, forward, backward",
    [
        (SDPBackend.FLASH_ATTENTION, 4095, 1, 1),
        (SDPBackend.FLASH_ATTENTION, 4096, 1, 2),  # 4096 x 32 heads x 128 rows x 128 = 2^31
        (SDPBackend.CUDNN_ATTENTION, 65_535, 1, 1),
        (SDPBackend.CUDNN_ATTENTION, 65_536, 2, 2),
    ],
)
def test_no_call_of_real_size_overflows_an_index(
    choice: SDPBackend, problems: int, forward: int, backward: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_cuda, "choose_operator", lambda *tensors, **options: choice)
    query = torch.empty(problems, 32, 32, 128, dtype=torch.bfloat16, device="meta")
    key = torch.empty(problems, 32, 8, 128, dtype=torch.bfloat16, device="meta")
    counted = CountAttention()
    with counted:
        out, lse = TorchCudaKernel().forward(query, key, key, causal=False, scale=1.0)
        grads = TorchCudaKernel().backward(query, query, key, key, out, lse, causal=False, scale=1.0)
    assert (counted.forward, counted.backward) == (forward, backward)
    assert [tuple(grad.shape) for grad in grads] == [tuple(query.shape), tuple(key.shape), tuple(key.shape)]


class CountAttention(TorchDispatchMode):
    """Counts calls of attention operators."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.backward = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if "scaled_dot_product" in name:
            self.backward += "backward" in name
            self.forward += "backward" not in name
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("choice", OPERATORS, ids=lambda choice: choice.name)
def test_a_whole_group_is_exact(
    choice: SDPBackend, operators: Operators, simulated_collectives: SimulatedCollectives
) -> None:
    operators.choice = choice
    case = Case(scheme=Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL, group_size=2, micro_batch_size=2)
    problem = case.problem()
    got = attend_on_group(case, problem, kernel=TorchCudaKernel())
    errors = got.max_errors(case.dense(problem))
    assert {name: error for name, error in errors.items() if not error <= 1e-12} == {}


@pytest.mark.parametrize("choice", OPERATORS, ids=lambda choice: choice.name)
def test_pytorchs_own_shape_functions_agree(choice: SDPBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *args, **kwargs: choice.value)
    tensors = [t.to(device="meta", dtype=torch.bfloat16) for t in inputs(causal=False, strided=False)]
    kernel = TorchCudaKernel()
    out, lse = kernel.forward(*tensors[1:], causal=False, scale=0.3)
    grads = kernel.backward(tensors[0], *tensors[1:], out, lse, causal=False, scale=0.3)
    assert (out.shape, out.dtype) == (tensors[1].shape, torch.bfloat16)
    assert (tuple(lse.shape), lse.dtype) == ((3, 5, 4), torch.float32)
    assert [grad.shape for grad in grads] == [tensor.shape for tensor in tensors[1:]]


@pytest.mark.parametrize(
    "rows, keys, flash_is_usable, expected",
    [
        (128, 256, True, SDPBackend.CUDNN_ATTENTION),
        (128, 192, True, SDPBackend.FLASH_ATTENTION),
        (32, 128, True, SDPBackend.FLASH_ATTENTION),
        (64, 64, True, SDPBackend.FLASH_ATTENTION),
        (64, 64, False, SDPBackend.CUDNN_ATTENTION),  # the self-test decides
    ],
)
def test_cudnn_gets_no_length_that_ends_within_its_groups_if_flash_can_take_it(
    rows: int, keys: int, flash_is_usable: bool, expected: SDPBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *args, **kwargs: SDPBackend.CUDNN_ATTENTION.value)
    monkeypatch.setattr(torch_cuda, "can_use_flash_attention", lambda params: flash_is_usable)
    query, key = torch.zeros(1, 2, rows, 8), torch.zeros(1, 2, keys, 8)
    assert choose_operator(query, key, key, causal=False, scale=1.0) == expected


@pytest.mark.parametrize("choice", [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION], ids=lambda choice: choice.name)
def test_a_choice_without_a_log_sum_exp_is_refused(choice: SDPBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *args, **kwargs: choice.value)
    tensors = [torch.zeros(1, 2, 4, 8)] * 3
    with pytest.raises(ValueError, match=rf"do not take torch.float32.*its choice is {choice.name}.*Use --bf16"):
        choose_operator(*tensors, causal=False, scale=1.0)


def test_a_head_dim_that_pytorch_would_pad_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *args, **kwargs: SDPBackend.FLASH_ATTENTION.value)
    tensors = [torch.zeros(1, 2, 4, 12, dtype=torch.bfloat16)] * 3
    with pytest.raises(ValueError, match="with head dim 12 on cpu"):
        choose_operator(*tensors, causal=False, scale=1.0)


def test_the_selector_is_asked_with_gradients_and_grouped_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def selector(*tensors: Any, **options: Any) -> int:
        seen.update(options, grad=[t.requires_grad for t in tensors[:3]], enabled=torch.is_grad_enabled())
        return SDPBackend.CUDNN_ATTENTION.value

    monkeypatch.setattr(torch, "_fused_sdp_choice", selector)
    with torch.no_grad():
        choice = choose_operator(*[torch.zeros(1, 2, 4, 8)] * 3, causal=True, scale=0.5)
    assert choice == SDPBackend.CUDNN_ATTENTION
    assert seen == {"scale": 0.5, "enable_gqa": True, "grad": [True] * 3, "enabled": True}
