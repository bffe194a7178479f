# SPDX-License-Identifier: Apache-2.0
"""Runs one tile of a plan: views of its rows, the kernel call, and the merge or the sum into the rank's rows.

Shapes: S local rows, R rows of the gather buffer, U rows of either, B micro-batch, N query heads, K key/value heads,
D head dim; G independent problems of one tile (runs times micro-batch), T query rows of one problem.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from megatron_csbp.transformer.annotations import annotate
from megatron_csbp.transformer.attention_plan import AttentionPlan
from megatron_csbp.transformer.kernels.interface import AttentionKernel
from megatron_csbp.transformer.kernels.local_interface import LocalKernel
from megatron_csbp.transformer.softmax_merge import merge_partial
from megatron_csbp.transformer.tile import MaskKind, RowPattern, Tile


class KeyValue(NamedTuple):
    """Keys and values of one key source, or their gradients: both [U, B, K, D]."""

    key: Tensor
    value: Tensor


class Merged(NamedTuple):
    """Attention results merged over all tiles: output [S, B, N, D] and natural log-sum-exp [S, B, N]."""

    out: Tensor
    lse: Tensor


class QuerySide(NamedTuple):
    """What a backward tile reads by query row: gradient of the output and query [S, B, N, D], merged results."""

    grad_out: Tensor
    query: Tensor
    merged: Merged


@dataclass(frozen=True)
class TileExecutor:
    """Computes tiles with one kernel.

    Attributes:
        kernel: computes dense or causal attention.
        scale: factor on the scores, usually 1/sqrt(D).
    """

    kernel: AttentionKernel
    scale: float

    def forward(self, tile: Tile, query_SBND: Tensor, keys: KeyValue, merged: Merged) -> None:
        """Compute one tile and merge it into the accumulated results, in place.

        Args:
            tile: what to compute.
            query_SBND: this rank's queries, [S, B, N, D].
            keys: keys and values of the tile's key source.
            merged: accumulated results, in the accumulation dtype.
        """
        with annotate("forward", tile.kind):
            partial_out_GTND, partial_lse_GTN = self.kernel.forward(
                _problems(query_SBND, tile.query),
                _problems(keys.key, tile.key),
                _problems(keys.value, tile.key),
                causal=tile.mask is MaskKind.CAUSAL,
                scale=self.scale,
            )
        with annotate("merge", tile.kind):
            out, lse = _run_view(merged.out, tile.query), _run_view(merged.lse, tile.query)
            partial_out, partial_lse = partial_out_GTND.reshape(out.shape), partial_lse_GTN.reshape(lse.shape)
            if tile.writes_first:
                out.copy_(partial_out)
                lse.copy_(partial_lse)
            else:
                merge_partial(out, lse, partial_out, partial_lse)

    def forward_local(self, plan: AttentionPlan, query_SBND: Tensor, local: KeyValue, merged: Merged) -> None:
        """Compute all local tiles into the accumulated results, in place: in one call if the kernel can.

        Args:
            plan: the rank's tiles.
            query_SBND: this rank's queries, [S, B, N, D].
            local: this rank's keys and values.
            merged: results to write, in the accumulation dtype; what they held is overwritten.
        """
        if isinstance(self.kernel, LocalKernel):
            with annotate("forward", "local tiles"):
                out_SBND, lse_SBN = self.kernel.forward_local(query_SBND, *local, plan=plan, scale=self.scale)
            merged.out.copy_(out_SBND)
            merged.lse.copy_(lse_SBN)
            return
        for tile in plan.local_tiles:
            self.forward(tile, query_SBND, local, merged)

    def backward_local(
        self, plan: AttentionPlan, queries: QuerySide, local: KeyValue, grad_query_SBND: Tensor, local_grads: KeyValue
    ) -> tuple[Tile, ...]:
        """Add the first local tiles' share to the gradients, in place, and return the tiles that are left.

        The rest can run beside the reduce-scatter. Nothing is left if the kernel computes all tiles in one call.
        """
        if isinstance(self.kernel, LocalKernel):
            with annotate("backward", "local tiles"):
                grads = self.kernel.backward_local(
                    queries.grad_out, queries.query, *local, *queries.merged, plan=plan, scale=self.scale
                )
            for total, share in zip((grad_query_SBND, *local_grads), grads, strict=True):
                total.add_(share)
            return ()
        first, rest = plan.backward_local_tiles
        for tile in first:
            self.backward(tile, queries, local, grad_query_SBND, local_grads)
        return rest

    def backward(
        self, tile: Tile, queries: QuerySide, keys: KeyValue, grad_query_SBND: Tensor, key_grads: KeyValue
    ) -> None:
        """Add one tile's share to the gradients of query, key and value, in place.

        Args:
            tile: what to compute.
            queries: what the forward pass saved by query row, and the gradient of its output.
            keys: keys and values of the tile's key source.
            grad_query_SBND: accumulated gradient of this rank's queries.
            key_grads: accumulated gradients of `keys`.
        """
        with annotate("backward", tile.kind):
            partial_query_GTND, partial_key_GUKD, partial_value_GUKD = self.kernel.backward(
                _problems(queries.grad_out, tile.query),
                _problems(queries.query, tile.query),
                _problems(keys.key, tile.key),
                _problems(keys.value, tile.key),
                _problems(queries.merged.out, tile.query),
                _problems(queries.merged.lse, tile.query),
                causal=tile.mask is MaskKind.CAUSAL,
                scale=self.scale,
            )
        with annotate("add gradients", tile.kind):
            _add(grad_query_SBND, tile.query, partial_query_GTND)
            _add(key_grads.key, tile.key, partial_key_GUKD)
            _add(key_grads.value, tile.key, partial_value_GUKD)


def _add(grad_UB: Tensor, pattern: RowPattern, partial_GU: Tensor) -> None:
    """Add the gradients of a tile's problems [G, U, ...] to the rows of a pattern, in place."""
    view = _run_view(grad_UB, pattern)
    view.add_(partial_GU.reshape(view.shape))


def _run_view(tensor_UB: Tensor, pattern: RowPattern) -> Tensor:
    """Return the rows of a pattern as a view [runs..., B, T, ...] of a tensor [U, B, ...]."""
    row_stride, *rest = tensor_UB.stride()
    view = tensor_UB.as_strided(
        (*(count for count, _ in pattern.repeats), pattern.length, *tensor_UB.shape[1:]),
        (*(stride * row_stride for _, stride in pattern.repeats), row_stride, *rest),
        tensor_UB.storage_offset() + pattern.start * row_stride,
    )
    run_dims = len(pattern.repeats)
    return view.movedim(run_dims + 1, run_dims)


def _problems(tensor_UB: Tensor, pattern: RowPattern) -> Tensor:
    """Return the rows of a pattern as [G, T, ...].

    This is a view where one stride can span the runs and the micro-batch: for a single run, or for B = 1 where the
    runs are evenly spaced. Otherwise it is a copy.
    """
    return _run_view(tensor_UB, pattern).flatten(0, len(pattern.repeats))
