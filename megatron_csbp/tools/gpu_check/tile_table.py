# SPDX-License-Identifier: Apache-2.0
"""Times each tile of one rank's plan on its own, beside what the model of an H200 says of it.

Shapes: S local rows, R rows of the gather buffer, N query heads, K key/value heads, D head dim; micro-batch 1.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_csbp.reporting.attention_model import Heads, tile_costs
from megatron_csbp.tools.gpu_check.settings import Settings
from megatron_csbp.transformer.geometry.layer_plans import rank_rows
from megatron_csbp.transformer.geometry.plan import plan_attention
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import Scheme, Sharding
from megatron_csbp.transformer.geometry.tiles import KeySource, Tile
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask
from megatron_csbp.transformer.kernels import AttentionKernel
from megatron_csbp.transformer.softmax_merge import accumulation_dtype
from megatron_csbp.transformer.tile_executor import Gradients, KeyValue, Merged, QuerySide, TileExecutor


@dataclass(frozen=True)
class TileTiming:
    """One tile, measured and modelled; all heads at once, merge and sums among it.

    Attributes:
        backend: name of the backend.
        length: L.
        tile: where its keys lie, and its mask.
        shape: problems x rows x keys.
        launches: modelled, forward and backward.
        forward_us: measured.
        modelled_forward_us: modelled for an H200.
        backward_us: measured.
        modelled_backward_us: modelled for an H200.
    """

    backend: str
    length: int
    tile: str
    shape: str
    launches: str
    forward_us: float
    modelled_forward_us: float
    backward_us: float
    modelled_backward_us: float


def time_each_tile(kernel: AttentionKernel, settings: Settings, length: int) -> Iterator[TileTiming]:
    """Yield a line for each tile of the last rank under CSBP.

    Args:
        kernel: computes the tiles.
        settings: sizes.
        length: L.
    """
    size, shape = settings.timing_group_size, settings.timing_heads
    rows = rank_rows(
        Sample(length, settings.block_size), Sharding(size, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL), size - 1
    )
    plan = plan_attention(rows, Mask(CleanAttention.TOKEN_CAUSAL))
    heads = Heads(
        num_query_heads=shape.num_query_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
    )
    executor = TileExecutor(kernel, shape.head_dim**-0.5)
    query, *local = _projections(settings, rows.num_rows)
    sources = {
        KeySource.LOCAL: KeyValue(*local),
        KeySource.GATHERED: KeyValue(*_projections(settings, plan.clean.num_rows)[1:]),
    }
    merged = Merged(_sums(query), _sums(query[..., 0]))
    queries = QuerySide(query, query, Merged(query, merged.lse))
    sums = {source: Gradients(_sums(query), KeyValue(*map(_sums, keys))) for source, keys in sources.items()}
    for cost in tile_costs(plan, heads):
        tile, source = cost.tile, cost.tile.key_source

        def forward(tile: Tile = tile, source: KeySource = source) -> None:
            executor.forward(tile, query, sources[source], merged)

        def backward(tile: Tile = tile, source: KeySource = source) -> None:
            executor.backward(tile, queries, sources[source], sums[source])

        yield TileTiming(
            backend=kernel.name,
            length=length,
            tile=tile.kind,
            shape=f"{tile.query.num_problems} x {tile.query.num_rows} x {tile.key.num_rows}",
            launches=f"{cost.forward.launches} + {cost.backward.launches}",
            forward_us=_median_us(forward, settings),
            modelled_forward_us=round(1e6 * cost.forward.seconds, 1),
            backward_us=_median_us(backward, settings),
            modelled_backward_us=round(1e6 * cost.backward.seconds, 1),
        )


def _projections(settings: Settings, rows: int) -> list[Tensor]:
    """Return query, key and value [rows, 1, heads, D] in bf16."""
    heads = settings.timing_heads
    counts = (heads.num_query_heads, heads.num_key_value_heads, heads.num_key_value_heads)
    shapes = [(rows, 1, count, heads.head_dim) for count in counts]
    return [torch.randn(shape, dtype=torch.bfloat16, device=settings.device) for shape in shapes]


def _sums(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=accumulation_dtype(tensor.dtype), device=tensor.device)


def _median_us(function: Callable[[], object], settings: Settings) -> float:
    """Return the median time of a call, after one to warm up, with nothing else on the device."""
    on_gpu = settings.device.type == "cuda"
    times = []
    for _ in range(1 + settings.repeats):
        if on_gpu:
            torch.cuda.synchronize(settings.device)
        started = time.perf_counter()
        function()
        if on_gpu:
            torch.cuda.synchronize(settings.device)
        times.append(time.perf_counter() - started)
    return round(1e6 * statistics.median(times[1:]), 1)
