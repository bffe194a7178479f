# SPDX-License-Identifier: Apache-2.0
"""The self-test passes right kernels and refuses wrong ones, each by what is wrong with it."""

import importlib.util
import math
import time
import warnings
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex_module

from megatron_csbp.transformer.geometry.plan import plan_attention
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import Scheme, Sharding
from megatron_csbp.transformer.geometry.tiles import MaskKind
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask
from megatron_csbp.transformer.kernels import HeadShape, checked_kernel, flex, self_test
from megatron_csbp.transformer.kernels.cudnn_tails import ends_within_a_group
from megatron_csbp.transformer.kernels.flex import FlexKernel
from megatron_csbp.transformer.kernels.reference import ReferenceKernel
from megatron_csbp.transformer.kernels.self_test import TOLERANCE, check_kernel
from megatron_csbp.transformer.kernels.torch_kernel import TorchCpuKernel
from megatron_csbp.transformer.kernels.transformer_engine import TransformerEngineKernel
from megatron_csbp.transformer.kernels.transformer_engine_adapter import FusedAttention
from tests.support.transformer_engine_stand_in import StandIn

CPU = torch.device("cpu")
HEADS = HeadShape(num_query_heads=4, num_key_value_heads=2, head_dim=16)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_right_kernels_pass(dtype: torch.dtype) -> None:
    check_kernel(TorchCpuKernel(), CPU, dtype, HEADS)
    if dtype in (torch.bfloat16, torch.float16):
        check_kernel(TransformerEngineKernel(FusedAttention(StandIn().symbols())), CPU, dtype, HEADS)


def test_every_mask_of_transformer_engine_is_tried_forward_and_backward() -> None:
    stand_in = StandIn()
    check_kernel(TransformerEngineKernel(FusedAttention(stand_in.symbols())), CPU, torch.bfloat16, HEADS)
    for is_backward in (False, True):
        tried = {call["attn_mask_type"] for call in stand_in.calls if ("d_o" in call) == is_backward}
        assert tried == {"no_mask", "causal", "padding", "padding_causal"}


@pytest.mark.parametrize("length", [4096, 2**15, 2**18])
@pytest.mark.parametrize("scheme", [Scheme.SINGLE, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL])
def test_training_asks_for_nothing_that_is_not_tried(scheme: Scheme, length: int) -> None:
    """What decides on masks and operators: causal or not, and whether a length ends within a group of cuDNN's."""
    tried = {(causal, ends_within_a_group(rows, keys)) for causal, _, rows, keys in self_test._CASES}
    size = 1 if scheme is Scheme.SINGLE else 8
    for rank, clean_attention, window in product(range(size), CleanAttention, (None, 7, 1000, 1024)):
        rows = RankRows(Sample(length, 32), Sharding(size, scheme), rank)
        for tile in plan_attention(rows, Mask(clean_attention, window)).tiles:
            lengths = tile.query.num_rows, tile.key.num_rows
            assert (tile.mask is not MaskKind.FULL, ends_within_a_group(*lengths)) in tried


def test_it_takes_milliseconds_and_leaves_the_random_state_alone() -> None:
    check_kernel(TorchCpuKernel(), CPU, torch.bfloat16, HEADS)
    state, started = torch.get_rng_state(), time.process_time()
    check_kernel(TorchCpuKernel(), CPU, torch.bfloat16, HEADS)
    assert time.process_time() - started < 0.5
    assert torch.equal(torch.get_rng_state(), state)


class Wrong(ReferenceKernel):
    """Attention with one fault."""

    name = "torch"

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def forward(
        self, query_GTND: Tensor, key_GUKD: Tensor, value_GUKD: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        if self.fault == "no kernel for small tiles" and query_GTND.shape[1] < 16:
            raise RuntimeError("no kernel image is available")
        if self.fault == "no mercy":
            raise SystemError("an extension's own kind of error")
        if self.fault == "ignores the mask":
            causal = False
        if self.fault == "reads strides wrongly":
            key_GUKD = key_GUKD.contiguous().view(-1).roll(1).view(key_GUKD.shape)
        out, lse = super().forward(query_GTND, key_GUKD, value_GUKD, causal=causal, scale=scale)
        if self.fault == "NaN in the last row":
            out = out.index_fill(1, torch.tensor([out.shape[1] - 1]), torch.nan)
        return out, lse / math.log(2) if self.fault == "log-sum-exp in base 2" else lse

    def backward(self, *tensors: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        grad_out, query, key, value, out, lse = tensors
        if self.fault == "ignores the merged log-sum-exp":
            out, lse = super().forward(query, key, value, causal=causal, scale=scale)
        grads = super().backward(grad_out, query, key, value, out, lse, causal=causal, scale=scale)
        if self.fault == "zeros beyond the keys" and key.shape[1] % 128 == 64:
            # As if a key of zeros were there, with a weight that fp32 cannot hold.
            weight = torch.exp(0 - lse.float()).unsqueeze(-1)
            return grads[0] + weight * 0, grads[1], grads[2]
        return (grads[0], grads[1], grads[2] * 1.2) if self.fault == "scales a gradient" else grads


@pytest.mark.parametrize(
    "fault, message",
    [
        ("ignores the mask", "its output is off by"),
        ("reads strides wrongly", "its output is off by"),
        ("NaN in the last row", "its output is off by nan"),
        ("log-sum-exp in base 2", "its log-sum-exp is off by"),
        ("ignores the merged log-sum-exp", "its gradient of the query is off by"),
        ("scales a gradient", "its gradient of the value is off by"),
        ("no kernel for small tiles", "fails in its self-test .no kernel image is available"),
        ("no mercy", "fails in its self-test .an extension's own kind of error"),
        ("zeros beyond the keys", "its gradient of the query is not finite where all scores of a row are very neg"),
    ],
)
def test_a_wrong_kernel_is_refused_by_what_is_wrong(fault: str, message: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^--csbp-attention-backend torch \(CPU.*{message}.*Use --csbp-attention-ba"
    ):
        check_kernel(Wrong(fault), CPU, torch.bfloat16, HEADS)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlexAttention in PyTorch's dense form (see test_flex.py)."""
    monkeypatch.setattr(flex, "compiled_flex_attention", lambda: flex_module.flex_attention)
    monkeypatch.setattr(flex_module, "_validate_device", lambda *tensors: None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        yield
    torch._dynamo.reset()


class FlexOnCpu(TorchCpuKernel, FlexKernel):
    """FlexAttention for local tiles, the CPU operator for the others."""

    name = "flex"
    factor = 1.0

    def backward_local(self, *tensors: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        grads = super().backward_local(*tensors, **options)
        return grads[0], grads[1] * self.factor, grads[2]


def test_a_kernel_of_local_tiles_is_tested_on_them_too(uncompiled: None) -> None:
    kernel = FlexOnCpu()
    check_kernel(kernel, CPU, torch.bfloat16, HEADS)
    kernel.factor = 1.2
    with pytest.raises(ValueError, match=r"--csbp-attention-backend flex .*its gradient of the key is off by"):
        check_kernel(kernel, CPU, torch.bfloat16, HEADS)


def test_each_combination_is_tested_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[torch.dtype] = []
    monkeypatch.setattr(self_test, "check_kernel", lambda kernel, device, dtype, heads: checked.append(dtype))
    checked_kernel.cache_clear()
    kernels = [checked_kernel("auto", CPU, dtype, HEADS) for dtype in (torch.bfloat16, torch.float32, torch.bfloat16)]
    checked_kernel.cache_clear()
    assert checked == [torch.bfloat16, torch.float32]
    assert kernels[0] is kernels[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: no GPU kernel is checked")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["torch", "flex", "transformer_engine"])
def test_gpu_kernels_pass(name: str, dtype: torch.dtype) -> None:
    if name == "transformer_engine" and importlib.util.find_spec(name) is None:
        pytest.skip("Transformer Engine is not installed: its kernels are not checked")
    checked_kernel(name, torch.device("cuda", 0), dtype, HeadShape(32, 8, 128))
