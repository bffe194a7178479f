# SPDX-License-Identifier: Apache-2.0
"""FlexAttention over the local tiles: its block mask against the plan, its results against the tiles one by one.

FlexAttention compiles its backward for GPUs only, so it runs here uncompiled, in PyTorch's own dense form. Tested are
the mask, the merge and the gradients that go in.
Shapes: S local rows, B micro-batch, N query heads, K key/value heads, D head dim.
"""

import itertools
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention as flex_module

from megatron_csbp.transformer.geometry.plan import AttentionPlan, plan_attention
from megatron_csbp.transformer.geometry.scheme import BlockAssignment, Scheme
from megatron_csbp.transformer.geometry.tiles import MaskKind
from megatron_csbp.transformer.geometry.visibility import CleanAttention, WindowAnchor
from megatron_csbp.transformer.kernels import flex
from megatron_csbp.transformer.kernels.flex import FlexKernel
from megatron_csbp.transformer.kernels.flex_mask import BLOCK, local_block_mask, local_mask_function, pairs_by_block
from megatron_csbp.transformer.kernels.local_interface import LocalKernel
from megatron_csbp.transformer.kernels.reference import ReferenceKernel
from megatron_csbp.transformer.kernels.torch_cuda import TorchCudaKernel
from megatron_csbp.transformer.softmax_merge import merge_partial
from megatron_csbp.transformer.tile_executor import Gradients, KeyValue, Merged, QuerySide, TileExecutor
from tests.support.attention_cases import DISTRIBUTED_SCHEMES, Case, attend_on_group
from tests.support.simulated_group import SimulatedCollectives

CPU = torch.device("cpu")
SCALE = 0.3
CASES = [
    Case(
        scheme=scheme, group_size=size, block_size=block, blocks_per_chunk=blocks, clean_attention=clean, assignment=to
    )
    for (scheme, size), (block, blocks), clean, to in itertools.product(
        [(Scheme.SINGLE, 1), *((scheme, 2) for scheme in DISTRIBUTED_SCHEMES)],
        [(1, 3), (32, 5), (48, 3)],
        CleanAttention,
        BlockAssignment,
    )
]
SPECIAL = [
    replace(case, **changes)
    for case in CASES
    if case.block_size == 32
    for changes in (
        {"window": 1},
        {"window": 100},
        {"window": 100, "anchor": WindowAnchor.BLOCK},
        {"num_views": 2, "documents": ((0, 45), (64, 96))},
        {"active": ((0, 3),), "window": 40},
        {"documents": ((32, 96), (96, 150)), "window": 50},
    )
]


def dense_mask(plan: AttentionPlan) -> np.ndarray:
    """Who sees whom among local rows, bool [S, S], from the plan's tiles row by row."""
    mask = np.zeros((plan.rows.num_rows,) * 2, bool)
    for tile in plan.local_tiles:
        for queries, keys in zip(tile.query.rows(), tile.key.rows(), strict=True):
            allowed = np.ones((len(queries), len(keys)), bool)
            if tile.mask is not MaskKind.FULL:
                allowed = np.tril(allowed) if tile.mask is MaskKind.CAUSAL else np.triu(allowed)
            mask[np.ix_(queries, keys)] |= allowed
    return mask


@pytest.mark.parametrize("clean_queries", [True, False])
@pytest.mark.parametrize("case", CASES + SPECIAL, ids=str)
def test_the_mask_is_the_plans(case: Case, clean_queries: bool) -> None:
    for rank in range(case.group_size):
        plan = plan_attention(case.rows(rank), case.mask, clean_queries=clean_queries)
        expected, rows = dense_mask(plan), torch.arange(plan.rows.num_rows)
        function = local_mask_function(plan, CPU)
        allowed = function(rows[:1], rows[:1], rows[:, None], rows[None, :])
        np.testing.assert_array_equal(allowed.numpy(), expected)
        blocks = -(-len(rows) // BLOCK)
        padded = np.zeros((blocks * BLOCK,) * 2, bool)
        padded[: len(rows), : len(rows)] = expected
        counted = padded.reshape(blocks, BLOCK, blocks, BLOCK).sum(axis=(1, 3))
        np.testing.assert_array_equal(pairs_by_block(plan), counted)


@pytest.mark.parametrize("clean_attention", CleanAttention)
def test_the_block_mask_is_what_flex_attention_would_build_itself(clean_attention: CleanAttention) -> None:
    plan = Case(group_size=2, block_size=16, blocks_per_chunk=25, clean_attention=clean_attention).plan(1)
    ours = local_block_mask(plan, CPU)
    rows = plan.rows.num_rows
    theirs = flex_module.create_block_mask(ours.mask_mod, None, None, rows, rows, device="cpu", BLOCK_SIZE=BLOCK)
    assert rows % BLOCK
    assert ours.shape == theirs.shape
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), msg=name)
    torch.testing.assert_close(ours.to_dense(), theirs.to_dense())
    assert ours.full_kv_num_blocks is not None
    assert ours.full_kv_num_blocks.sum() > 0


def test_a_long_sequence_needs_no_tensor_of_its_square() -> None:
    plan = Case(group_size=8, block_size=32, blocks_per_chunk=512).plan(3)
    assert plan.rows.sample.length == 1 << 18
    mask = local_block_mask(plan, CPU)
    assert local_block_mask(plan, CPU) is mask, "one object, so that it is compiled once"
    tensors = [value for value in mask.as_tuple() if isinstance(value, torch.Tensor)]
    assert max(t.numel() for t in tensors) == (plan.rows.num_rows // BLOCK) ** 2
    assert mask.sparsity() > 80


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlexAttention in PyTorch's dense form; PyTorch refuses its backward on a CPU only for want of a compiled one."""
    monkeypatch.setattr(flex, "compiled_flex_attention", lambda: flex_module.flex_attention)
    monkeypatch.setattr(flex_module, "_validate_device", lambda *tensors: None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        yield
    torch._dynamo.reset()


def problem(rows: int) -> tuple[Tensor, Tensor, KeyValue]:
    """Gradient of the output, query, keys and values in fp64 for B = 2, N = 4, K = 2, D = 8, as fused projections."""
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(rows, 2, 12, 8, dtype=torch.float64, generator=generator)
    grad_out, query, key, value = fused.split([4, 4, 2, 2], dim=2)
    return grad_out, query, KeyValue(key, value)


@pytest.mark.parametrize("scheme, group_size", [(Scheme.SINGLE, 1), (Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL, 2)])
@pytest.mark.parametrize("clean_attention", CleanAttention)
def test_one_call_gives_the_local_tiles_and_their_share_of_the_gradients(
    scheme: Scheme, group_size: int, clean_attention: CleanAttention, uncompiled: None
) -> None:
    plan = Case(
        scheme=scheme, group_size=group_size, block_size=12, blocks_per_chunk=3, clean_attention=clean_attention
    ).plan(0)
    grad_out, query, local = problem(plan.rows.num_rows)
    executor = TileExecutor(ReferenceKernel(), SCALE)
    expected = Merged(torch.empty_like(query), torch.empty(query.shape[:3], dtype=torch.float64))
    for tile in plan.local_tiles:
        executor.forward(tile, query, local, expected)
    out, lse = FlexKernel().forward_local(query, *local, plan=plan, scale=SCALE)
    torch.testing.assert_close(out, expected.out, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(lse, expected.lse, atol=1e-12, rtol=1e-12)

    # As if gathered keys had been merged too.
    merged = Merged(expected.out.clone(), expected.lse.clone())
    further = torch.randn(query.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    merge_partial(*merged, further, further.sum(-1))
    grads = [torch.zeros_like(tensor) for tensor in (query, *local)]
    for tile in plan.local_tiles:
        executor.backward(tile, QuerySide(grad_out, query, merged), local, Gradients(grads[0], KeyValue(*grads[1:])))
    got = FlexKernel().backward_local(grad_out, query, *local, *merged, plan=plan, scale=SCALE)
    for name, ours, theirs in zip(("dq", "dk", "dv"), got, grads, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def test_it_is_compiled_once_for_each_shape_whatever_rank_mask_and_pass(
    uncompiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = CompileCounter()
    counted = torch.compile(flex_module.flex_attention, backend=counter, dynamic=False, fullgraph=True)
    monkeypatch.setattr(flex, "compiled_flex_attention", lambda: counted)
    kernel, compiled = FlexKernel(), []
    for blocks, clean, rank in itertools.product((3, 4), CleanAttention, (0, 1)):
        plan = Case(group_size=2, block_size=4, blocks_per_chunk=blocks, clean_attention=clean).plan(rank)
        grad_out, query, local = problem(plan.rows.num_rows)
        merged = kernel.forward_local(query, *local, plan=plan, scale=SCALE)
        kernel.backward_local(grad_out, query, *local, *merged, plan=plan, scale=SCALE)
        compiled.append(counter.frame_count)
    assert compiled == [1] * 4 + [2] * 4


@pytest.mark.slow
def test_more_shapes_than_pytorch_compiles_by_default_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    counter, compile_function = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **how: compile_function(function, backend=counter, **how))
    flex.compiled_flex_attention.cache_clear()
    try:
        attend = flex.compiled_flex_attention()
        for rows in range(1, 12):
            attend(*[torch.zeros(1, 1, rows, 16)] * 3)
    finally:
        flex.compiled_flex_attention.cache_clear()
        torch._dynamo.reset()
    assert counter.frame_count == 11 > torch._dynamo.config.recompile_limit


def test_only_flex_computes_local_tiles_at_once() -> None:
    assert isinstance(FlexKernel(), LocalKernel)
    assert not isinstance(TorchCudaKernel(), LocalKernel)


class FlexOnCpu(ReferenceKernel, FlexKernel):
    """FlexAttention for local tiles, the reference for gathered ones; one thread at a time: tracing is global."""

    name = "flex"
    turn = threading.Lock()

    def forward_local(self, *tensors: Tensor, plan: AttentionPlan, scale: float) -> tuple[Tensor, Tensor]:
        with self.turn:
            return super().forward_local(*tensors, plan=plan, scale=scale)

    def backward_local(self, *tensors: Tensor, plan: AttentionPlan, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        with self.turn:
            return super().backward_local(*tensors, plan=plan, scale=scale)


@pytest.mark.parametrize(
    "changes",
    [{"micro_batch_size": 2}, {"window": 5, "num_views": 2}, {"documents": ((4, 11), (12, 40)), "active": ((1, 4),)}],
    ids=["static", "window", "documents"],
)
@pytest.mark.parametrize("scheme", DISTRIBUTED_SCHEMES)
def test_a_whole_group_is_exact(
    scheme: Scheme, changes: dict[str, Any], uncompiled: None, simulated_collectives: SimulatedCollectives
) -> None:
    case = Case(scheme=scheme, group_size=2, **changes)
    given = case.problem()
    got = attend_on_group(case, given, kernel=FlexOnCpu())
    errors = got.max_errors(case.dense(given), case.num_views)
    assert {name: error for name, error in errors.items() if not error <= 1e-12} == {}
