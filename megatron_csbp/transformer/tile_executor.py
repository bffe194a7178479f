# SPDX-License-Identifier: Apache-2.0
"""Runs one tile of a plan: its rows, the kernel call, and the merge or the sum into the rank's rows.

Shapes: S local rows, R rows of the gather buffer, U rows of either, B micro-batch, N query heads, K key/value heads,
D head dim; G independent problems of one tile (runs times micro-batch), T query rows of one problem.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_csbp.transformer.annotations import annotate
from megatron_csbp.transformer.device_arrays import on_device
from megatron_csbp.transformer.geometry.plan import AttentionPlan
from megatron_csbp.transformer.geometry.tiles import MaskKind, RowPattern, Tile
from megatron_csbp.transformer.kernels.interface import AttentionKernel
from megatron_csbp.transformer.kernels.local_interface import LocalKernel
from megatron_csbp.transformer.softmax_merge import merge_partial


class KeyValue(NamedTuple):
    """Keys and values of one key source, or their gradients: both [U, B, K, D]."""

    key: Tensor
    value: Tensor

    def heads(self, heads: slice) -> "KeyValue":
        """Return the keys and values of some key/value heads."""
        return KeyValue(self.key[:, :, heads], self.value[:, :, heads])


class Merged(NamedTuple):
    """Attention results merged over all tiles: output [S, B, N, D] and natural log-sum-exp [S, B, N]."""

    out: Tensor
    lse: Tensor

    def heads(self, heads: slice) -> "Merged":
        """Return the results of some query heads."""
        return Merged(self.out[:, :, heads], self.lse[:, :, heads])


class QuerySide(NamedTuple):
    """What a backward tile reads by query row: gradient of the output and query [S, B, N, D], merged results."""

    grad_out: Tensor
    query: Tensor
    merged: Merged

    def heads(self, heads: slice) -> "QuerySide":
        """Return what belongs to some query heads."""
        return QuerySide(self.grad_out[:, :, heads], self.query[:, :, heads], self.merged.heads(heads))


class Gradients(NamedTuple):
    """Accumulated gradients: of the queries [S, B, N, D], and of keys and values [U, B, K, D]."""

    query: Tensor
    keys: KeyValue


@dataclass(frozen=True)
class TileExecutor:
    """Computes tiles with one kernel.

    Attributes:
        kernel: computes dense or causal attention.
        scale: factor on the scores, usually 1/sqrt(D).
    """

    kernel: AttentionKernel
    scale: float

    def forward(
        self, tile: Tile, query_SBND: Tensor, keys: KeyValue, merged: Merged, final_SBND: Tensor | None = None
    ) -> None:
        """Compute one tile and merge it into the accumulated results, in place.

        Args:
            tile: what to compute.
            query_SBND: this rank's queries, [S, B, N, D].
            keys: keys and values of the tile's key source.
            merged: accumulated results, in the accumulation dtype.
            final_SBND: takes the output of rows that this tile writes last, in its own dtype; None if `merged` does.
        """
        shape = _ProblemShape(tile, query_SBND.shape[2], keys.key.shape[2])
        with annotate("forward", tile.kind):
            partial_out_GTND, partial_lse_GTN = self.kernel.forward(
                shape.queries(query_SBND),
                shape.keys(keys.key),
                shape.keys(keys.value),
                causal=tile.mask is not MaskKind.FULL,
                scale=self.scale,
            )
        with annotate("merge", tile.kind):
            partial_out, partial_lse = shape.unfolded(partial_out_GTND), shape.unfolded(partial_lse_GTN)
            if tile.writes_last and final_SBND is not None:
                views = (_run_view(tensor, tile.query) for tensor in (*merged, final_SBND))
                out, lse, final = views
                merge_partial(out, lse, partial_out.reshape(out.shape), partial_lse.reshape(lse.shape), final)
            else:
                _update(merged, tile.query, partial_out, partial_lse, first=tile.writes_first)

    def forward_local(self, plan: AttentionPlan, query_SBND: Tensor, local: KeyValue, merged: Merged) -> None:
        """Compute all local tiles into the accumulated results, in place: in one call if the kernel can.

        Args:
            plan: the rank's tiles.
            query_SBND: this rank's queries, [S, B, N, D].
            local: this rank's keys and values.
            merged: results to write, in the accumulation dtype; what they held is overwritten.
        """
        one_by_one = plan.local_tiles
        if isinstance(self.kernel, LocalKernel):
            with annotate("forward", "local tiles"):
                out_SBND, lse_SBN = self.kernel.forward_local(query_SBND, *local, plan=plan, scale=self.scale)
            merged.out.copy_(out_SBND)
            merged.lse.copy_(lse_SBN)
            one_by_one = ()
        for start, stop in plan.unwritten:
            merged.out[start:stop].zero_()
            merged.lse[start:stop].fill_(-torch.inf)
        for tile in one_by_one:
            self.forward(tile, query_SBND, local, merged)

    def backward_local(
        self, plan: AttentionPlan, queries: QuerySide, local: KeyValue, grads: Gradients
    ) -> tuple[Tile, ...]:
        """Add the first local tiles' share to the gradients, in place, and return the tiles that are left.

        The rest can run beside the reduce-scatter. Nothing is left if the kernel computes all tiles in one call.
        """
        if isinstance(self.kernel, LocalKernel):
            with annotate("backward", "local tiles"):
                shares = self.kernel.backward_local(
                    queries.grad_out, queries.query, *local, *queries.merged, plan=plan, scale=self.scale
                )
            for total, share in zip((grads.query, *grads.keys), shares, strict=True):
                total.add_(share)
            return ()
        first, rest = plan.backward_local_tiles
        for tile in first:
            self.backward(tile, queries, local, grads)
        return rest

    def backward(self, tile: Tile, queries: QuerySide, keys: KeyValue, grads: Gradients) -> None:
        """Add one tile's share to the gradients of query, key and value, in place.

        Args:
            tile: what to compute.
            queries: what the forward pass saved by query row, and the gradient of its output.
            keys: keys and values of the tile's key source.
            grads: accumulated gradients of this rank's queries and of `keys`.
        """
        shape = _ProblemShape(tile, queries.query.shape[2], keys.key.shape[2])
        with annotate("backward", tile.kind):
            partial_query_GTND, partial_key_GUKD, partial_value_GUKD = self.kernel.backward(
                shape.queries(queries.grad_out),
                shape.queries(queries.query),
                shape.keys(keys.key),
                shape.keys(keys.value),
                shape.queries(queries.merged.out),
                shape.queries(queries.merged.lse),
                causal=tile.mask is not MaskKind.FULL,
                scale=self.scale,
            )
        with annotate("add gradients", tile.kind):
            _add(grads.query, tile.query, shape.unfolded(partial_query_GTND))
            _add(grads.keys.key, tile.key, shape.in_order(partial_key_GUKD))
            _add(grads.keys.value, tile.key, shape.in_order(partial_value_GUKD))


class _ProblemShape:
    """How the rows of one tile are handed to a kernel: reversed for an anticausal tile, heads folded in a small one.

    With R = N/K query heads for each key head, an unmasked problem [T, N, D] over [U, K, D] is the same as one of
    [T R, K, D]: every row meets every key.
    """

    def __init__(self, tile: Tile, num_query_heads: int, num_key_value_heads: int) -> None:
        self._tile = tile
        self._reversed = tile.mask is MaskKind.ANTICAUSAL
        self._ratio = num_query_heads // num_key_value_heads
        self._folds = self._ratio > 1 and tile.folds_heads

    def queries(self, tensor_SBN: Tensor) -> Tensor:
        """Return query rows [S, B, N, ...] as problems [G, T, N, ...] or [G, T R, K, ...]."""
        rows_GTN = self.in_order(_problems(tensor_SBN, self._tile.query))
        if not self._folds:
            return rows_GTN
        return _split(rows_GTN, 2, self._ratio).transpose(2, 3).flatten(1, 2)

    def keys(self, tensor_UBK: Tensor) -> Tensor:
        """Return key rows [U, B, K, ...] as problems [G, U, K, ...]."""
        return self.in_order(_problems(tensor_UBK, self._tile.key))

    def unfolded(self, result_GTN: Tensor) -> Tensor:
        """Return a kernel's results by query row as [G, T, N, ...] in the order of rows."""
        if self._folds:
            result_GTN = _split(result_GTN, 1, self._ratio).transpose(2, 3).flatten(2, 3)
        return self.in_order(result_GTN)

    def in_order(self, rows_GT: Tensor) -> Tensor:
        """Reverse rows, or keys, of an anticausal tile: its own inverse."""
        return rows_GT.flip(1) if self._reversed else rows_GT


def _update(merged: Merged, pattern: RowPattern, out_GTND: Tensor, lse_GTN: Tensor, *, first: bool) -> None:
    """Write or merge a tile's results into the rows of a pattern, in place."""

    def update(out: Tensor, lse: Tensor) -> None:
        partial_out, partial_lse = out_GTND.reshape(out.shape), lse_GTN.reshape(lse.shape)
        if first:
            out.copy_(partial_out)
            lse.copy_(partial_lse)
        else:
            merge_partial(out, lse, partial_out, partial_lse)

    if pattern.starts is None:
        update(_run_view(merged.out, pattern), _run_view(merged.lse, pattern))
        return
    out, lse = _problems(merged.out, pattern), _problems(merged.lse, pattern)
    update(out, lse)
    _with_rows(merged.out.index_copy_, merged.out, pattern, out)
    _with_rows(merged.lse.index_copy_, merged.lse, pattern, lse)


def _add(grad_UB: Tensor, pattern: RowPattern, partial_GU: Tensor) -> None:
    """Add the gradients of a tile's problems [G, U, ...] to the rows of a pattern, in place."""
    if pattern.starts is None:
        view = _run_view(grad_UB, pattern)
        view.add_(partial_GU.reshape(view.shape))
        return
    # No row is listed twice, so nothing depends on the order of the additions.
    _with_rows(grad_UB.index_add_, grad_UB, pattern, partial_GU)


def _with_rows(
    change: Callable[[int, Tensor, Tensor], Tensor], tensor_UB: Tensor, pattern: RowPattern, values_GT: Tensor
) -> None:
    """Call `change(0, rows, values)` with a pattern's listed rows and problems [G, T, ...] for them."""
    by_row = _split(values_GT, 0, values_GT.shape[0] // pattern.num_problems).transpose(1, 2).flatten(0, 1)
    change(0, _listed_rows(tensor_UB, pattern), by_row.to(tensor_UB.dtype))


def _listed_rows(tensor_UB: Tensor, pattern: RowPattern) -> Tensor:
    return on_device(pattern.all_rows, tensor_UB.device)


def _run_view(tensor_UB: Tensor, pattern: RowPattern) -> Tensor:
    """Return the rows of a pattern as a view [runs..., B, segments..., length, ...] of a tensor [U, B, ...]."""
    row_stride, *rest = tensor_UB.stride()
    strides = (*pattern.repeats, *pattern.segments)
    view = tensor_UB.as_strided(
        (*(count for count, _ in strides), pattern.length, *tensor_UB.shape[1:]),
        (*(stride * row_stride for _, stride in strides), row_stride, *rest),
        tensor_UB.storage_offset() + pattern.start * row_stride,
    )
    return view.movedim(len(strides) + 1, len(pattern.repeats))


def _problems(tensor_UB: Tensor, pattern: RowPattern) -> Tensor:
    """Return the rows of a pattern as [G, T, ...].

    This is a view where one stride can span the runs and the micro-batch: for a single run, or for B = 1 where the
    runs are evenly spaced. Otherwise it is a copy.
    """
    if pattern.starts is not None:
        rows = tensor_UB.index_select(0, _listed_rows(tensor_UB, pattern))
        return _split(rows, 0, pattern.num_rows).transpose(1, 2).flatten(0, 1)
    view = _run_view(tensor_UB, pattern)
    runs, segments = len(pattern.repeats), len(pattern.segments)
    return view.flatten(runs + 1, runs + 1 + segments).flatten(0, runs)


def _split(tensor: Tensor, dim: int, inner: int) -> Tensor:
    """Return a dim as two, of which the inner one has this size."""
    shape = tensor.shape
    return tensor.reshape(*shape[:dim], shape[dim] // inner, inner, *shape[dim + 1 :])
