# SPDX-License-Identifier: Apache-2.0
"""The fused merge: equal to PyTorch's under Triton's interpreter, and compiled for Hopper without a device."""

import importlib.util
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_csbp.transformer import softmax_merge
from megatron_csbp.transformer.softmax_merge import has_fused_merge, merge_partial

triton = pytest.importorskip("triton", reason="Triton is not installed: the fused merge was not checked")

NAME = "megatron_csbp.transformer.kernels.triton_merge"
RUNS, BLOCKS, BATCH, ROWS, HEADS, HEAD_DIM = 2, 3, 2, 5, 3, 16


@pytest.fixture(scope="module")
def interpreted() -> Any:
    """The module whose kernel Triton's interpreter runs: Triton decides so when a kernel is defined."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        spec = importlib.util.find_spec(NAME)
        assert spec is not None
        assert spec.loader is not None
        module: ModuleType = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def rows_of_a_rank(heads: int = HEADS, head_dim: int = HEAD_DIM, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a view [runs, blocks, B, T, N, D] with gaps between runs and rows, as a tile has it of all rows."""
    whole = torch.randn(RUNS * 40, BATCH, heads + 1, head_dim, dtype=dtype)[:, :, :heads]
    stride = whole.stride()
    view = whole.as_strided(
        (RUNS, BLOCKS, ROWS, *whole.shape[1:]), (40 * stride[0], 2 * ROWS * stride[0], stride[0], *stride[1:])
    )
    return view.movedim(3, 2)


def of_a_kernel(dtype: torch.dtype, head_dim: int = HEAD_DIM) -> tuple[Tensor, Tensor]:
    """Return an output and a log-sum-exp as kernels lay them out: [G, T, N, D] and, in memory, [G, N, T]."""
    problems = RUNS * BLOCKS * BATCH
    out = torch.randn(problems, ROWS, HEADS, head_dim).to(dtype)
    lse = 5 * torch.randn(problems, HEADS, ROWS).transpose(1, 2)
    shape = (RUNS, BLOCKS, BATCH, ROWS, HEADS)
    return out.reshape(*shape, head_dim), lse.reshape(shape)


def rare_values(lse: Tensor, other: Tensor) -> None:
    """Put sides without keys, NaN and far apart scores into two log-sum-exps."""
    lse[0, 0, 0, 0, 0] = other[0, 0, 0, 1, 0] = -torch.inf
    lse[1, 1, 1, 1, 1] = other[1, 1, 1, 1, 1] = -torch.inf
    lse[1, 0, 0, 2, 2] = torch.nan
    other[1, 2, 0, 4, 2] = torch.nan
    lse[0, 2, 1, 3, 0], other[0, 2, 1, 3, 0] = 3000.0, -3000.0


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, of -inf less -inf
@pytest.mark.parametrize("writes_final", [False, True])
@pytest.mark.parametrize("dtype, head_dim", [(torch.bfloat16, 16), (torch.float32, 16), (torch.float32, 12)])
def test_the_kernel_does_what_pytorch_does(
    dtype: torch.dtype, head_dim: int, writes_final: bool, interpreted: Any
) -> None:
    torch.manual_seed(0)
    partial_out, partial_lse = of_a_kernel(dtype, head_dim)
    both = []
    for merge in (merge_partial, interpreted.merge_fused):
        torch.manual_seed(1)
        out, lse = rows_of_a_rank(head_dim=head_dim), 5 * rows_of_a_rank()[..., 0]
        final = rows_of_a_rank(head_dim=head_dim).to(dtype) if writes_final else None
        rare_values(lse, partial_lse)
        before = out.clone()
        merge(out, lse, partial_out, partial_lse, *([final] if writes_final else []))
        if final is not None and merge is not merge_partial:
            assert torch.equal(out.nan_to_num(), before.nan_to_num()), "the accumulated rows need not be written"
        both.append((out if final is None else final, lse))
    (out, lse), (fused_out, fused_lse) = both
    assert fused_out.dtype == (dtype if writes_final else torch.float32)
    close = {} if fused_out.dtype is torch.bfloat16 else {"rtol": 2e-6, "atol": 2e-6}
    torch.testing.assert_close(fused_out, out, equal_nan=True, **close)
    torch.testing.assert_close(fused_lse, lse, equal_nan=True, rtol=2e-6, atol=2e-6)
    assert fused_lse.isnan().sum() == 2
    assert not fused_out[0].isnan().any()


def test_memory_beside_the_rows_stays_as_it_is(interpreted: Any) -> None:
    whole = torch.randn(6, 2, 4, 16)
    before, part = whole.clone(), whole[1:4, :, 1:3]
    interpreted.merge_fused(part, torch.zeros(3, 2, 2), torch.randn(3, 2, 2, 16), torch.zeros(3, 2, 2))
    assert not torch.equal(part, before[1:4, :, 1:3])
    for beside in (slice(0, 1), slice(4, None)):
        assert torch.equal(whole[beside], before[beside])
    assert torch.equal(whole[:, :, 0], before[:, :, 0])
    assert torch.equal(whole[:, :, 3], before[:, :, 3])


def test_a_tile_has_few_dims_and_alignment_is_what_every_row_has(interpreted: Any) -> None:
    out = torch.empty(8, 1, 4, 128)
    sizes, strides = interpreted._fewest_dims((8, 1, 4), [out.stride()[:-1], (4, 4, 1)])
    assert sizes == [1, 1, 1, 1, 32]
    assert strides == [[0, 0, 0, 0, 128], [0, 0, 0, 0, 1]]
    assert interpreted._aligned_elements([out]) == 4
    assert interpreted._aligned_elements([out, out.bfloat16()]) == 8
    assert interpreted._aligned_elements([out.flatten()[1:129].view(1, 128)]) == 1


@pytest.mark.parametrize("writes_final", [False, True])
def test_it_compiles_for_hopper_without_a_device(writes_final: bool) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron_csbp.transformer.kernels.triton_merge import merge_kernel

    constants = {"HEAD_DIM": 128, "ROWS": 16, "COLUMNS": 128, "ALIGNED": 8, "FINAL": writes_final}
    pointers = {"out": "*fp32", "lse": "*fp32", "partial_out": "*bf16", "partial_lse": "*fp32", "final": "*bf16"}
    signature = {name: pointers.get(name, "i64") for name in merge_kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    # What a launch says of pointers that are multiples of 16 bytes.
    aligned = {(number,): [["tt.divisibility", 16]] for number in range(len(pointers))}
    source = ASTSource(merge_kernel, signature, constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    ptx = compiled.asm["ptx"]
    assert ".target sm_90" in ptx
    assert len(compiled.asm["cubin"]) > 0
    # Rows are read 16 bytes at a time, and exactly one of the two outputs is written so.
    assert "ld.global.v4.b32" in ptx
    assert ("cvt.rn.bf16" in ptx) == writes_final


def test_the_merge_is_fused_on_cuda_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_fused_merge("cuda")
    assert not has_fused_merge("cpu")
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(softmax_merge, "has_fused_merge", lambda device_type: True)
    stand_in = SimpleNamespace(merge_fused=lambda *tensors: calls.append(tensors))
    monkeypatch.setattr(softmax_merge.importlib, "import_module", lambda name: {NAME: stand_in}[name])
    tensors = (torch.zeros(2, 4), torch.zeros(2), torch.zeros(2, 4), torch.zeros(2))
    merge_partial(*tensors)
    assert calls == [(*tensors, None)]
