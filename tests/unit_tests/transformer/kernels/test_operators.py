# SPDX-License-Identifier: Apache-2.0
"""The names of operators, by kind of tile, are those that each backend takes for the tiles of the plan."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.nn.attention import SDPBackend

from megatron_csbp.transformer.geometry.layer_plans import layer_plans
from megatron_csbp.transformer.geometry.plan import AttentionPlan
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import Scheme, Sharding
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask
from megatron_csbp.transformer.kernels import AttentionKernel, HeadShape, torch_cuda
from megatron_csbp.transformer.kernels.hybrid import HybridKernel
from megatron_csbp.transformer.kernels.operators import operator_names, takes_flash_for_everything
from megatron_csbp.transformer.kernels.reference import ReferenceKernel
from megatron_csbp.transformer.kernels.torch_cuda import TorchCudaKernel
from megatron_csbp.transformer.kernels.torch_kernel import TorchCpuKernel
from megatron_csbp.transformer.kernels.transformer_engine import TransformerEngineKernel

CPU, META = torch.device("cpu"), torch.device("meta")  # the latter stands for CUDA: no memory, no CPU operator
HEADS = HeadShape(8, 2, 128)
KINDS = {"local full", "local causal", "gathered full"}


def plan_of(length: int, block_size: int = 32) -> AttentionPlan:
    """Return the tiles of rank 0 of 2; its chunks are a quarter of the sequence."""
    sharding = Sharding(2, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL)
    return layer_plans(Sample(length, block_size), sharding, 0).plan(Mask(CleanAttention.TOKEN_CAUSAL))


def names_of(kernel: Any, plan: AttentionPlan, device: torch.device = META) -> dict[str, str]:
    return operator_names(cast(AttentionKernel, kernel), plan, HEADS, torch.bfloat16, device)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Size, torch.Size, bool]]:
    """Shapes of queries and keys, and causality, that PyTorch's selector was asked for; it always says cuDNN."""
    shapes: list[tuple[torch.Size, torch.Size, bool]] = []

    def choose(query: torch.Tensor, key: torch.Tensor, value: Any, mask: Any, p: float, causal: bool, **_: Any) -> int:
        shapes.append((query.shape, key.shape, causal))
        return SDPBackend.CUDNN_ATTENTION.value

    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    monkeypatch.setattr(torch_cuda, "can_use_flash_attention", lambda params: True)
    return shapes


@pytest.mark.parametrize("kernel, operator", [(ReferenceKernel(), "dense"), (TorchCpuKernel(), "flash on the CPU")])
def test_on_a_cpu_every_kind_has_one_operator(kernel: AttentionKernel, operator: str) -> None:
    assert names_of(kernel, plan_of(1024), CPU) == dict.fromkeys(KINDS, operator)


def test_pytorchs_choice_is_asked_for_each_tile_with_the_heads_that_the_kernel_gets(
    asked: list[tuple[torch.Size, torch.Size, bool]],
) -> None:
    # Chunks of 256: folded, blocks of 32 have 128 rows of one key head, but only 32 keys.
    names = names_of(TorchCudaKernel(), plan_of(1024))
    assert names == {"local full": "cuDNN, flash", "local causal": "cuDNN", "gathered full": "cuDNN"}
    assert (torch.Size([1, 1, 128, 128]), torch.Size([1, 1, 32, 128]), False) in asked
    assert (torch.Size([1, 4, 256, 128]), torch.Size([1, 1, 256, 128]), True) in asked


def test_a_length_within_cudnns_groups_makes_all_tiles_flash(
    asked: list[tuple[torch.Size, torch.Size, bool]],
) -> None:
    assert names_of(TorchCudaKernel(), plan_of(4 * 96)) == dict.fromkeys(KINDS, "flash")


def test_transformer_engines_mask_is_named() -> None:
    kernel = TransformerEngineKernel(cast(Any, SimpleNamespace()))
    names = names_of(kernel, plan_of(1024))
    assert names["local causal"] == "cuDNN (causal)"
    assert names["local full"] == "cuDNN (no_mask), cuDNN (padding)"
    assert names["gathered full"] == "cuDNN (no_mask)"
    assert names_of(kernel, plan_of(4 * 96))["local causal"] == "cuDNN (padding_causal)"


@pytest.mark.parametrize(
    "gathered, operator",
    [(TorchCudaKernel(), "cuDNN"), (TransformerEngineKernel(cast(Any, SimpleNamespace())), "cuDNN (no_mask)")],
)
def test_the_hybrid_has_one_call_for_local_tiles_and_its_other_half_for_the_rest(
    gathered: AttentionKernel, operator: str, asked: list[tuple[torch.Size, torch.Size, bool]]
) -> None:
    kernel = HybridKernel(cast(Any, SimpleNamespace()), gathered)
    assert names_of(kernel, plan_of(1024)) == {
        "all local tiles": "FlexAttention, one call",
        "gathered full": operator,
    }


@pytest.mark.parametrize(
    "operators, version, expected",
    [
        (("flash", "flash"), "2.10.0+cu128", True),
        (("flash", "flash"), "2.9.1", True),
        (("flash", "flash"), "2.11.0", False),
        (("flash", "flash"), "2.11.0a0+git1234", False),
        (("flash", "flash"), "3.0.0", False),
        (("flash", "cuDNN"), "2.10.0", False),
        (("cuDNN, flash", "flash"), "2.10.0", False),
        (("cuDNN (no_mask)", "cuDNN (no_mask)"), "2.10.0", False),
    ],
)
def test_flash_for_everything_is_noticed_before_torch_2_11(
    operators: tuple[str, str], version: str, expected: bool
) -> None:
    names = dict(zip(("local full", "gathered full"), operators, strict=True))
    assert takes_flash_for_everything(names, version) == expected


@pytest.mark.parametrize("gathered, expected", [({"gathered full": "flash"}, True), ({}, False)])
def test_one_call_for_local_tiles_says_nothing_of_the_selector(gathered: dict[str, str], expected: bool) -> None:
    names = {"all local tiles": "FlexAttention, one call"} | gathered
    assert takes_flash_for_everything(names, "2.10.0") == expected
