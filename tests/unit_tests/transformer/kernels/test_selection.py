# SPDX-License-Identifier: Apache-2.0
"""Which kernel a backend name and a device give, and what is refused."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_csbp.transformer.kernels import select_kernel, selection
from megatron_csbp.transformer.kernels import transformer_engine as transformer_engine_module
from megatron_csbp.transformer.kernels.torch_cuda import TorchCudaKernel
from megatron_csbp.transformer.kernels.torch_kernel import TorchCpuKernel
from megatron_csbp.transformer.kernels.transformer_engine import TransformerEngineKernel
from megatron_csbp.transformer.kernels.transformer_engine_adapter import FusedAttention
from tests.support.transformer_engine_stand_in import StandIn

ROOT = Path(__file__).parents[4]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Transformer Engine were installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name == "transformer_engine" else find(name))
    kernel = TransformerEngineKernel(FusedAttention(StandIn().symbols()))
    monkeypatch.setattr(transformer_engine_module, "TransformerEngineKernel", lambda: kernel)
    selection._kernel.cache_clear()


@pytest.fixture(autouse=True)
def no_settings_of_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVTE_FUSED_ATTN", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.mark.parametrize("name, kernel", [("auto", "torch"), ("torch", "torch"), ("reference", "reference")])
def test_names_give_their_kernel_on_a_cpu(name: str, kernel: str) -> None:
    assert select_kernel(name, CPU).name == kernel
    assert isinstance(select_kernel("torch", CPU), TorchCpuKernel)


@pytest.mark.parametrize("name", ["torch", "flex", "transformer_engine"])
def test_names_give_their_kernel_on_cuda(name: str, transformer_engine: None) -> None:
    assert select_kernel(name, CUDA).name == name
    assert isinstance(select_kernel("torch", CUDA), TorchCudaKernel)


def test_a_kernel_is_made_once_since_it_remembers_what_its_selector_said() -> None:
    assert select_kernel("torch", CUDA) is select_kernel("auto", CUDA)


def test_auto_on_cuda_is_transformer_engine_where_it_is_installed(transformer_engine: None) -> None:
    assert select_kernel("auto", CUDA).name == "transformer_engine"
    assert select_kernel("auto", CUDA, "fused").name == "transformer_engine"


def test_auto_on_cuda_is_torch_where_transformer_engine_is_not_installed() -> None:
    assert select_kernel("auto", CUDA).name == "torch"


def test_auto_on_cuda_is_torch_where_fused_attention_is_turned_off(
    transformer_engine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert select_kernel("auto", CUDA, "flash").name == "torch"
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    assert select_kernel("auto", CUDA).name == "torch"


def test_transformer_engine_is_refused_where_its_fused_attention_is_turned_off(
    transformer_engine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"--attention-backend flash .*; use --attention-backend auto or fused, or"):
        select_kernel("transformer_engine", CUDA, "flash")
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    with pytest.raises(ValueError, match="NVTE_FUSED_ATTN=0 turns off"):
        select_kernel("transformer_engine", CUDA)


def test_an_unknown_name_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"'fast' is not a backend; use auto, .*, torch, flex, hybrid\.$"):
        select_kernel("fast", CPU)


@pytest.mark.parametrize("name", ["transformer_engine", "flex"])
def test_a_backend_for_gpus_is_refused_on_a_cpu_instead_of_falling_back(name: str) -> None:
    with pytest.raises(ValueError, match=rf"--csbp-attention-backend {name} needs a CUDA device.*-backend torch"):
        select_kernel(name, CPU)


def test_a_backend_is_imported_when_it_is_chosen_and_no_condition_of_the_others() -> None:
    """A PyTorch without FlexAttention, or without what we use of it."""
    code = (
        "import sys; sys.modules['torch.nn.attention.flex_attention'] = None;"
        "import torch; from megatron_csbp.transformer.kernels import select_kernel;"
        "print(select_kernel('torch', torch.device('cuda')).name, select_kernel('auto', torch.device('cpu')).name);"
        "select_kernel('flex', torch.device('cuda'))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.stdout.split() == ["torch", "torch"]
    assert "ValueError: --csbp-attention-backend flex does not import with torch" in run.stderr
    assert run.stderr.rstrip().endswith("use --csbp-attention-backend torch.")


def test_another_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has no kernel for device 'xpu'.*--device cpu"):
        select_kernel("auto", torch.device("xpu"))
