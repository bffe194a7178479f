# SPDX-License-Identifier: Apache-2.0
"""What the start summary says of kernels: backend and why, operators, launches, and a torch that knows flash only."""

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend

from megatron_csbp.reporting.attention_model import Heads, tile_costs
from megatron_csbp.reporting.kernel_summary import attention_kernel_lines, head_shape, static_chunk_rows
from megatron_csbp.transformer.geometry.layer_plans import LayerPlans, layer_plans
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import Scheme, Sharding
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask
from megatron_csbp.transformer.kernels import HeadShape, operators
from megatron_csbp.transformer.kernels.torch_cuda import TorchCudaKernel
from megatron_csbp.transformer.kernels.torch_kernel import TorchCpuKernel
from tests.support.megatron_arguments import VALID, parse

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LENGTH = 16384


def arguments(flags: str = "") -> Namespace:
    """Return arguments as after validation, as far as the summary reads them."""
    network = "--num-layers 4 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128"
    args, _ = parse(f"{VALID} {network} --clean-attention token-causal {flags}")
    args.params_dtype = torch.bfloat16
    args.csbp_head_groups = 2
    return args


@pytest.fixture
def plans() -> LayerPlans:
    return layer_plans(Sample(LENGTH, 32), Sharding(2, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL), 0)


@pytest.fixture
def choice(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """As if there were a CUDA device; `operator` is what PyTorch's selector says on it."""
    said = SimpleNamespace(operator=SDPBackend.FLASH_ATTENTION)

    def empty(*shape: int, device: torch.device, **options: Any) -> torch.Tensor:
        return torch.empty(*shape, device="meta", **options)

    monkeypatch.setattr(operators, "torch", SimpleNamespace(empty=empty))
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *tensors, **options: said.operator.value)
    return said


def test_heads_are_those_of_a_tensor_parallel_rank() -> None:
    assert head_shape(arguments()) == HeadShape(32, 8, 128)
    assert head_shape(arguments("--tensor-model-parallel-size 4")) == HeadShape(8, 2, 128)


def test_on_a_cpu_the_lines_name_backend_reason_merge_and_operators(plans: LayerPlans) -> None:
    first, *rest = attention_kernel_lines(arguments(), TorchCpuKernel(), plans, CPU)
    assert "attention backend: torch (--csbp-attention-backend auto; the run is on a CPU)" in first
    assert first.endswith("merge by PyTorch's elementwise operators")
    (tiles,) = rest
    for kind in ("local full", "local causal", "gathered full"):
        assert f"{kind}: flash on the CPU" in tiles


def test_packed_samples_have_no_chunk_length_to_choose_a_backend_by(plans: LayerPlans) -> None:
    """A layer of them knows none either, so that the kernel which is tested and named is the one that runs."""
    assert static_chunk_rows(arguments(), plans.rows) == LENGTH // 4
    packed = arguments("--pack-documents --data-path documents")
    assert static_chunk_rows(packed, plans.rows) is None
    own = layer_plans(Sample(LENGTH, 32, documents=np.array([[0, 64], [64, LENGTH]])), plans.rows.sharding, 0)
    assert own.rows.static_chunk_length is None
    assert "tile by tile, for a sample of one document" in "".join(
        attention_kernel_lines(packed, TorchCpuKernel(), plans, CPU)
    )


def test_tiles_and_launches_are_those_of_the_model_at_the_runs_head_groups(plans: LayerPlans) -> None:
    *_, line = attention_kernel_lines(arguments(), TorchCpuKernel(), plans, CPU)
    plan = plans.plan(Mask(CleanAttention.TOKEN_CAUSAL))
    costs = tile_costs(plan, Heads(num_query_heads=32, num_key_value_heads=8, head_dim=128), 2)
    forward, backward = sum(c.forward.launches for c in costs), sum(c.backward.launches for c in costs)
    assert f"; {len(plan.tiles)} of them, some {forward} launches forward and {backward} backward in a layer" in line


def test_layers_with_a_window_have_a_line_of_their_own(plans: LayerPlans) -> None:
    flags = "--window-size 4095,0 --window-attn-skip-freq 2"
    _, *lines = attention_kernel_lines(arguments(flags), TorchCpuKernel(), plans, CPU)
    assert [line.strip().split(":")[0] for line in lines] == ["tiles, window 4096", "tiles"]


@pytest.mark.parametrize(
    "version, operator, warns",
    [
        ("2.10.0+cu128", SDPBackend.FLASH_ATTENTION, True),
        ("2.11.0+cu128", SDPBackend.FLASH_ATTENTION, False),
        ("2.10.0+cu128", SDPBackend.CUDNN_ATTENTION, False),
    ],
)
def test_on_cuda_a_torch_older_than_2_11_that_takes_flash_for_all_tiles_is_warned_of(
    version: str,
    operator: SDPBackend,
    warns: bool,
    plans: LayerPlans,
    choice: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr("megatron_csbp.transformer.kernels.torch_cuda.can_use_flash_attention", lambda params: True)
    choice.operator = operator
    lines = attention_kernel_lines(arguments("--csbp-attention-backend torch"), TorchCudaKernel(), plans, CUDA)
    notes = [line for line in lines if "note:" in line]
    assert len(notes) == warns
    assert all("since torch 2.11 its selector prefers cuDNN on Hopper" in note for note in notes)
    assert ("gathered full: flash" in lines[1]) == (operator is SDPBackend.FLASH_ATTENTION)


def test_on_a_cpu_nobody_is_warned(plans: LayerPlans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.0")
    lines = attention_kernel_lines(arguments(), TorchCpuKernel(), plans, CPU)
    assert not [line for line in lines if "note:" in line]
