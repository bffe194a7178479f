# SPDX-License-Identifier: Apache-2.0
"""Tiles on strided row patterns against the same attention on gathered rows."""

import pytest
import torch
from megatron_csbp.transformer.tile import MaskKind, RowPattern, Tile, TileKind
from torch import Tensor

from megatron_csbp.transformer.kernels.reference import ReferenceKernel
from megatron_csbp.transformer.tile_executor import KeyValue, Merged, QuerySide, TileExecutor

NUM_ROWS, HEADS, KV_HEADS, HEAD_DIM, SCALE = 48, 4, 2, 8, 0.3
PATTERNS = {
    "one run": (RowPattern(5, 7), RowPattern(3, 4)),
    "even runs": (RowPattern(2, 3, ((4, 9),)), RowPattern(1, 5, ((4, 11),))),
    "runs in two levels": (RowPattern(1, 2, ((2, 24), (3, 5))), RowPattern(0, 3, ((2, 20), (3, 6)))),
}


def tensors(micro_batch_size: int) -> tuple[Tensor, KeyValue, Tensor]:
    """Query, keys and values, and output gradient, as the views of one fused projection that Megatron hands over."""
    torch.manual_seed(0)
    fused = torch.randn(NUM_ROWS, micro_batch_size, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=torch.float64)
    query, key, value = fused.split([HEADS, KV_HEADS, KV_HEADS], dim=2)
    return query, KeyValue(key, value), torch.randn_like(query)


def empty_results(query: Tensor) -> Merged:
    return Merged(
        torch.full(query.shape, torch.nan, dtype=query.dtype), torch.full(query.shape[:3], torch.nan).double()
    )


@pytest.mark.parametrize("micro_batch_size", [1, 3])
@pytest.mark.parametrize("mask", MaskKind)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_tile_attends_run_by_run_and_touches_no_other_row(
    pattern: str, mask: MaskKind, micro_batch_size: int
) -> None:
    query_rows, key_rows = PATTERNS[pattern]
    tile = Tile(TileKind.CLEAN_DIAGONAL, query_rows, query_rows if mask is MaskKind.CAUSAL else key_rows, mask=mask)
    query, keys, grad_out = tensors(micro_batch_size)
    kernel = ReferenceKernel()
    executor = TileExecutor(kernel, SCALE)
    merged = empty_results(query)
    executor.forward(tile, query, keys, merged)
    grad_query, key_grads = torch.zeros_like(query), KeyValue(*(torch.zeros_like(t) for t in keys))
    executor.backward(tile, QuerySide(grad_out, query, merged), keys, grad_query, key_grads)

    expected = empty_results(query)
    expected_grads = [torch.zeros_like(t) for t in (query, *keys)]
    for run, key_run in zip(tile.query.rows(), tile.key.rows(), strict=True):
        problem = [t.transpose(0, 1) for t in (query[run], keys.key[key_run], keys.value[key_run])]
        out, lse = kernel.forward(*problem, causal=mask is MaskKind.CAUSAL, scale=SCALE)
        expected.out[run], expected.lse[run] = out.transpose(0, 1), lse.transpose(0, 1)
        grads = kernel.backward(
            grad_out[run].transpose(0, 1), *problem, out, lse, causal=mask is MaskKind.CAUSAL, scale=SCALE
        )
        for total, rows, grad in zip(expected_grads, (run, key_run, key_run), grads, strict=True):
            total[rows] += grad.transpose(0, 1)
    for got, wanted in zip((*merged, grad_query, *key_grads), (*expected, *expected_grads), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-13, rtol=1e-13, equal_nan=True)


def test_a_later_tile_is_merged_with_what_is_there() -> None:
    query, keys, _ = tensors(2)
    executor = TileExecutor(ReferenceKernel(), SCALE)
    rows, merged, expected = RowPattern(4, 6), empty_results(query), empty_results(query)
    executor.forward(Tile(TileKind.CORRUPTED_DIAGONAL, rows, RowPattern(0, 5)), query, keys, merged)
    executor.forward(Tile(TileKind.PREFIX, rows, RowPattern(5, 9)), query, keys, merged)
    executor.forward(Tile(TileKind.CORRUPTED_DIAGONAL, rows, RowPattern(0, 14)), query, keys, expected)
    torch.testing.assert_close(merged, expected, atol=1e-13, rtol=1e-13, equal_nan=True)


def test_views_are_passed_to_the_kernel_without_copies_for_one_sequence() -> None:
    query, keys, _ = tensors(1)
    seen: list[Tensor] = []

    class Spy(ReferenceKernel):
        def forward(self, *tensors: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
            seen.extend(tensors)
            return super().forward(*tensors, causal=causal, scale=scale)

    executor = TileExecutor(Spy(), SCALE)
    for query_rows, key_rows in (PATTERNS["one run"], PATTERNS["even runs"]):
        executor.forward(Tile(TileKind.CLEAN_DIAGONAL, query_rows, key_rows), query, keys, empty_results(query))
    assert len(seen) == 6
    assert {t.untyped_storage().data_ptr() for t in seen} == {query.untyped_storage().data_ptr()}
