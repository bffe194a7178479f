# SPDX-License-Identifier: Apache-2.0
"""Tiles on strided row patterns against the same attention on gathered rows."""

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_csbp.transformer.geometry import tiles
from megatron_csbp.transformer.geometry.tiles import MaskKind, RowPattern, Tile
from megatron_csbp.transformer.kernels.reference import ReferenceKernel
from megatron_csbp.transformer.tile_executor import Gradients, KeyValue, Merged, QuerySide, TileExecutor

NUM_ROWS, HEADS, KV_HEADS, HEAD_DIM, SCALE = 48, 4, 2, 8, 0.3
PATTERNS = {
    "one run": (RowPattern(7, 5), RowPattern(4, 3)),
    "even runs": (RowPattern(3, 2, ((4, 9),)), RowPattern(5, 1, ((4, 11),))),
    "runs in two levels": (RowPattern(2, 1, ((2, 24), (3, 5))), RowPattern(3, 0, ((2, 20), (3, 6)))),
    "rows in segments": (RowPattern(3, 2, ((2, 24),), ((2, 7),)), RowPattern(6, 3, ((2, 20),))),
    "listed starts": (RowPattern(2, starts=np.array([40, 3, 20])), RowPattern(5, starts=np.array([7, 30, 0]))),
    "listed starts in segments": (
        RowPattern(2, segments=((2, 5),), starts=np.array([30, 3])),
        RowPattern(5, starts=np.array([7, 30])),
    ),
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
    tile = Tile(query_rows, key_rows if mask is MaskKind.FULL else query_rows, mask=mask, writes_first=True)
    query, keys, grad_out = tensors(micro_batch_size)
    kernel = ReferenceKernel()
    executor = TileExecutor(kernel, SCALE)
    merged = empty_results(query)
    executor.forward(tile, query, keys, merged)
    grad_query, key_grads = torch.zeros_like(query), KeyValue(*(torch.zeros_like(t) for t in keys))
    executor.backward(tile, QuerySide(grad_out, query, merged), keys, Gradients(grad_query, key_grads))

    expected = empty_results(query)
    expected_grads = [torch.zeros_like(t) for t in (query, *keys)]
    for run, key_run in zip(tile.query.rows(), tile.key.rows(), strict=True):
        if mask is MaskKind.ANTICAUSAL:  # causal from the other end
            run, key_run = run[::-1].copy(), key_run[::-1].copy()
        problem = [t.transpose(0, 1) for t in (query[run], keys.key[key_run], keys.value[key_run])]
        out, lse = kernel.forward(*problem, causal=mask is not MaskKind.FULL, scale=SCALE)
        expected.out[run], expected.lse[run] = out.transpose(0, 1), lse.transpose(0, 1)
        grads = kernel.backward(
            grad_out[run].transpose(0, 1), *problem, out, lse, causal=mask is not MaskKind.FULL, scale=SCALE
        )
        for total, rows, grad in zip(expected_grads, (run, key_run, key_run), grads, strict=True):
            total[rows] += grad.transpose(0, 1)
    for got, wanted in zip((*merged, grad_query, *key_grads), (*expected, *expected_grads), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-13, rtol=1e-13, equal_nan=True)


def test_a_later_tile_is_merged_with_what_is_there() -> None:
    query, keys, _ = tensors(2)
    executor = TileExecutor(ReferenceKernel(), SCALE)
    rows, merged, expected = RowPattern(6, 4), empty_results(query), empty_results(query)
    executor.forward(Tile(rows, RowPattern(5, 0), writes_first=True), query, keys, merged)
    executor.forward(Tile(rows, RowPattern(9, 5)), query, keys, merged)
    executor.forward(Tile(rows, RowPattern(14, 0), writes_first=True), query, keys, expected)
    torch.testing.assert_close(merged, expected, atol=1e-13, rtol=1e-13, equal_nan=True)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_a_later_tile_of_listed_or_segmented_rows_is_merged_too(micro_batch_size: int, listed: bool) -> None:
    query, keys, _ = tensors(micro_batch_size)
    executor = TileExecutor(ReferenceKernel(), SCALE)
    rows = RowPattern(2, 3, ((2, 20),), ((2, 7),))
    if listed:
        rows = RowPattern(2, segments=((2, 7),), starts=np.array([23, 3]))
    merged, expected = empty_results(query), empty_results(query)

    def keys_from(start: int, length: int) -> RowPattern:
        return (
            RowPattern(length, start, ((2, 20),))
            if not listed
            else RowPattern(length, starts=np.array([20, 0]) + start)
        )

    executor.forward(Tile(rows, keys_from(0, 5), writes_first=True), query, keys, merged)
    executor.forward(Tile(rows, keys_from(5, 9)), query, keys, merged)
    executor.forward(Tile(rows, keys_from(0, 14), writes_first=True), query, keys, expected)
    torch.testing.assert_close(merged, expected, atol=1e-13, rtol=1e-13, equal_nan=True)


@pytest.mark.parametrize("rows", [1, 5, 128, 129])
@pytest.mark.parametrize("mask", [MaskKind.FULL, MaskKind.CAUSAL])
def test_query_heads_folded_into_rows_give_the_same(
    mask: MaskKind, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small unmasked problems alone are folded: a kernel sees as many query heads as key heads, and more rows."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2 * rows, 2, 6, 4, dtype=torch.float64, generator=generator)
    keys = KeyValue(*torch.randn(2, 2 * rows, 2, 2, 4, dtype=torch.float64, generator=generator))
    pattern = RowPattern(rows, 0, ((2, rows),))
    tile = Tile(pattern, pattern, mask=mask, writes_first=True)
    heads: list[int] = []

    class Spy(ReferenceKernel):
        def forward(self, query: Tensor, *rest: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
            heads.append(query.shape[2])
            return super().forward(query, *rest, causal=causal, scale=scale)

    results = []
    for most in (tiles.MOST_FOLDED_ROWS, 0):
        monkeypatch.setattr(tiles, "MOST_FOLDED_ROWS", most)
        executor, merged = TileExecutor(Spy(), SCALE), empty_results(query)
        executor.forward(tile, query, keys, merged)
        grads = Gradients(torch.zeros_like(query), KeyValue(*(torch.zeros_like(t) for t in keys)))
        executor.backward(tile, QuerySide(query * 2, query, merged), keys, grads)
        results.append((*merged, grads.query, *grads.keys))
    assert heads == [2 if mask is MaskKind.FULL and rows <= 128 else 6, 6]
    for folded, plain in zip(*results, strict=True):
        torch.testing.assert_close(folded, plain, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_the_last_tile_of_rows_writes_the_output_dtype(micro_batch_size: int) -> None:
    query, keys, _ = tensors(micro_batch_size)
    executor, merged, expected = TileExecutor(ReferenceKernel(), SCALE), empty_results(query), empty_results(query)
    rows, final = RowPattern(6, 4), torch.full(query.shape, torch.nan, dtype=torch.bfloat16)
    executor.forward(Tile(rows, RowPattern(5, 0), writes_first=True), query, keys, merged, final)
    assert final.isnan().all()
    executor.forward(Tile(rows, RowPattern(9, 5), writes_last=True), query, keys, merged, final)
    executor.forward(Tile(rows, RowPattern(14, 0), writes_first=True), query, keys, expected)
    torch.testing.assert_close(merged.lse, expected.lse, atol=1e-13, rtol=1e-13, equal_nan=True)
    assert torch.equal(final[4:10], expected.out[4:10].bfloat16())
    assert final[:4].isnan().all()
    assert final[10:].isnan().all()


def test_views_are_passed_to_the_kernel_without_copies_for_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "MOST_FOLDED_ROWS", 0)
    query, keys, _ = tensors(1)
    seen: list[Tensor] = []

    class Spy(ReferenceKernel):
        def forward(self, *tensors: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
            seen.extend(tensors)
            return super().forward(*tensors, causal=causal, scale=scale)

    executor = TileExecutor(Spy(), SCALE)
    for query_rows, key_rows in (PATTERNS["one run"], PATTERNS["even runs"]):
        executor.forward(Tile(query_rows, key_rows, writes_first=True), query, keys, empty_results(query))
    assert len(seen) == 6
    assert {t.untyped_storage().data_ptr() for t in seen} == {query.untyped_storage().data_ptr()}
