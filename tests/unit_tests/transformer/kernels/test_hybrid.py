# SPDX-License-Identifier: Apache-2.0
"""The hybrid backend hands each tile to the right half, and `auto` takes it for short chunks of one geometry."""

import importlib.util
from typing import Any

import pytest
import torch

from megatron_csbp.transformer.kernels import selection
from megatron_csbp.transformer.kernels.hybrid import HybridKernel
from megatron_csbp.transformer.kernels.local_interface import LocalKernel
from megatron_csbp.transformer.kernels.selection import HYBRID_CHUNK_ROWS, choose_backend, select_kernel

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Half:
    """Notes what it is asked for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, method: str) -> Any:
        def call(*tensors: Any, **options: Any) -> str:
            self.calls.append((method, tensors, options))
            return f"{self.name} {method}"

        return call


def test_local_tiles_go_to_one_half_and_gathered_ones_to_the_other() -> None:
    local, gathered = Half("local"), Half("gathered")
    kernel: Any = HybridKernel(local, gathered)
    assert isinstance(kernel, LocalKernel)
    assert kernel.forward(1, 2, 3, causal=True, scale=0.5) == "gathered forward"
    assert kernel.backward(1, 2, 3, 4, 5, 6, causal=True, scale=0.5) == "gathered backward"
    assert kernel.forward_local(1, 2, 3, plan="plan", scale=0.5) == "local forward_local"
    assert kernel.backward_local(1, 2, 3, 4, 5, 6, plan="plan", scale=0.5) == "local backward_local"
    assert gathered.calls == [
        ("forward", (1, 2, 3), {"causal": True, "scale": 0.5}),
        ("backward", (1, 2, 3, 4, 5, 6), {"causal": True, "scale": 0.5}),
    ]
    assert [options for _, _, options in local.calls] == [{"plan": "plan", "scale": 0.5}] * 2


@pytest.fixture(params=["transformer_engine", "torch"])
def for_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What computes tiles on this machine, by whether Transformer Engine is installed; Triton is."""
    installed = {"triton", *([request.param] if request.param != "torch" else [])}
    monkeypatch.delenv("NVTE_FUSED_ATTN", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
    name: str = request.param
    return name


@pytest.mark.parametrize(
    "rows, is_hybrid", [(None, False), (128, True), (HYBRID_CHUNK_ROWS, True), (HYBRID_CHUNK_ROWS + 1, False)]
)
def test_auto_takes_it_for_short_chunks_of_one_geometry_and_says_why(
    rows: int | None, is_hybrid: bool, for_tiles: str
) -> None:
    choice = choose_backend("auto", CUDA, static_chunk_rows=rows)
    assert choice.name == ("hybrid" if is_hybrid else for_tiles)
    assert (f"chunks of {rows} rows are short" in choice.reason) == is_hybrid
    installed = "is installed" if for_tiles == "transformer_engine" else "is not installed"
    assert f"Transformer Engine {installed}" in choice.reason
    assert choose_backend("auto", CPU, static_chunk_rows=rows) == ("torch", "the run is on a CPU")


def test_without_triton_auto_leaves_it(for_tiles: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else find(name))
    assert choose_backend("auto", CUDA, static_chunk_rows=128).name == for_tiles


def test_it_is_made_of_flex_and_what_is_best_for_tiles(for_tiles: str, monkeypatch: pytest.MonkeyPatch) -> None:
    selection._kernel.cache_clear()
    made = {name: type(name, (), {"name": name}) for name in ("flex", "TransformerEngineKernel", "TorchCudaKernel")}
    classes = {
        "flex": ("flex", "flex"),
        "transformer_engine": ("transformer_engine", "TransformerEngineKernel"),
        "torch cuda": ("torch_cuda", "TorchCudaKernel"),
    }
    load = selection.importlib.import_module
    fake = type("module", (), made)
    monkeypatch.setattr(
        selection.importlib, "import_module", lambda name: load(name) if name.endswith("hybrid") else fake
    )
    monkeypatch.setattr(selection, "_CLASSES", classes)
    kernel = select_kernel("hybrid", CUDA)
    selection._kernel.cache_clear()
    assert isinstance(kernel, HybridKernel)
    half: Any = kernel.local
    assert half.name == "flex"
    assert kernel.gathered.name == {"torch": "TorchCudaKernel"}.get(for_tiles, "TransformerEngineKernel")


def test_on_a_cpu_it_is_refused() -> None:
    with pytest.raises(ValueError, match="hybrid needs a CUDA device"):
        select_kernel("hybrid", CPU)
