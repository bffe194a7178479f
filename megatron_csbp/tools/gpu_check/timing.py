# SPDX-License-Identifier: Apache-2.0
"""Times and peak memory of one rank's attention without a network, and of two yardsticks.

Shapes: S local rows, B micro-batch (1 here), N query heads, K key/value heads, D head dim.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest

from megatron_csbp.tools.gpu_check.settings import Settings
from megatron_csbp.transformer.attention import AttentionContext, block_diffusion_attention
from megatron_csbp.transformer.communication import PendingWork, Transfers
from megatron_csbp.transformer.geometry.layer_plans import layer_plans
from megatron_csbp.transformer.geometry.plan import AttentionPlan
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import Scheme, Sharding
from megatron_csbp.transformer.geometry.tiles import KeySource, Tile
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask
from megatron_csbp.transformer.kernels import AttentionKernel
from megatron_csbp.transformer.kernels.flex import compiled_flex_attention
from megatron_csbp.transformer.kernels.flex_mask import local_block_mask
from megatron_csbp.transformer.kernels.local_interface import LocalKernel
from megatron_csbp.transformer.softmax_merge import accumulation_dtype
from megatron_csbp.transformer.tile_executor import Gradients, KeyValue, Merged, QuerySide, TileExecutor

_MASK = Mask(CleanAttention.TOKEN_CAUSAL)
# Matrix products of forward and backward: 2 and 5, each of 2 x D operations for one pair and head.
_FORWARD_PRODUCTS, _BACKWARD_PRODUCTS = 2, 5


@dataclass(frozen=True)
class Timing:
    """One measurement.

    Attributes:
        what: what was run.
        backend: name of the backend.
        length: L, clean tokens of the sequence.
        group_size: P of the rank that was timed; 1 for a whole sequence.
        forward_ms: median time of the forward pass.
        backward_ms: median time of the backward pass.
        tflops: rate over both passes, from the pairs that the mask allows.
        peak_gib: largest memory above that of the inputs; None on a CPU.
    """

    what: str
    backend: str
    length: int
    group_size: int
    forward_ms: float
    backward_ms: float
    tflops: float
    peak_gib: float | None


def time_backend(kernel: AttentionKernel, settings: Settings, length: int) -> Iterator[Timing]:
    """Yield the times of tiles by kind, of a whole rank, of a whole sequence, and of causal attention of equal work.

    Args:
        kernel: the backend.
        settings: sizes.
        length: L.
    """
    plan = _plan(settings, length, settings.timing_group_size)
    if isinstance(kernel, LocalKernel):
        yield _time_local(kernel, kernel.name, settings, plan)
        yield _time_rank(kernel, settings, plan)
        return
    yield from _time_tiles(kernel, settings, plan)
    yield _time_rank(kernel, settings, plan)
    yield _time_rank(kernel, settings, _plan(settings, length, 1))
    yield _time_causal(kernel, settings, plan)


def time_dense_flex(settings: Settings, length: int) -> Timing:
    """Return the time of one FlexAttention call on the mask of both whole copies: what is used without CSBP.

    Args:
        settings: sizes.
        length: L.
    """
    plan = _plan(settings, length, 1)
    mask = local_block_mask(plan, settings.device)
    inputs = _projections(settings, plan.rows.num_rows)

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query_BNSD, key_BKSD, value_BKSD = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        out, _ = compiled_flex_attention()(
            query_BNSD, key_BKSD, value_BKSD, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True)
        )
        out_SBND: Tensor = out.permute(2, 0, 1, 3)
        return out_SBND

    return _time_autograd("FlexAttention on both copies", "flex", settings, plan, plan.num_pairs, forward, inputs)


def _plan(settings: Settings, length: int, group_size: int) -> AttentionPlan:
    scheme = Scheme.SINGLE if group_size == 1 else Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL
    return layer_plans(Sample(length, settings.block_size), Sharding(group_size, scheme), 0).plan(_MASK)


def _time_tiles(kernel: AttentionKernel, settings: Settings, plan: AttentionPlan) -> Iterator[Timing]:
    """Yield the time of all tiles of each kind."""
    executor = TileExecutor(kernel, settings.timing_heads.head_dim**-0.5)
    query, *local = _projections(settings, plan.rows.num_rows)
    sources = {KeySource.LOCAL: KeyValue(*local)}
    sources[KeySource.GATHERED] = KeyValue(*_projections(settings, plan.rows.sample.length)[1:])
    dtype = accumulation_dtype(query.dtype)
    merged = Merged(torch.zeros_like(query, dtype=dtype), torch.zeros(query.shape[:3], dtype=dtype).to(query.device))
    queries = QuerySide(query, query, Merged(query, merged.lse))
    grad_query = torch.zeros_like(query, dtype=dtype)
    grads = {name: KeyValue(*(torch.zeros_like(t, dtype=dtype) for t in keys)) for name, keys in sources.items()}
    for kind in dict.fromkeys(tile.kind for tile in plan.tiles):
        tiles = [tile for tile in plan.tiles if tile.kind == kind]

        def forward(tiles: Sequence[Tile] = tiles) -> None:
            for tile in tiles:
                executor.forward(tile, query, sources[tile.key_source], merged)

        def backward(tiles: Sequence[Tile] = tiles) -> None:
            for tile in tiles:
                own_grads = Gradients(grad_query, grads[tile.key_source])
                executor.backward(tile, queries, sources[tile.key_source], own_grads)

        pairs = sum(tile.num_pairs for tile in tiles)
        times = (_median_ms(forward, settings), _median_ms(backward, settings))
        yield _timing(f"tiles: {kind}", kernel.name, settings, plan, pairs, times, None)


def _time_local(kernel: LocalKernel, name: str, settings: Settings, plan: AttentionPlan) -> Timing:
    """Return the time of all local tiles in one call, under the name of the backend."""
    query, key, value = _projections(settings, plan.rows.num_rows)
    scale = settings.timing_heads.head_dim**-0.5
    out, lse = kernel.forward_local(query, key, value, plan=plan, scale=scale)

    def forward() -> None:
        kernel.forward_local(query, key, value, plan=plan, scale=scale)

    def backward() -> None:
        kernel.backward_local(out, query, key, value, out, lse, plan=plan, scale=scale)

    pairs = sum(tile.num_pairs for tile in plan.local_tiles)
    times = (_median_ms(forward, settings), _median_ms(backward, settings))
    return _timing("local tiles in one call", name, settings, plan, pairs, times, None)


def _time_rank(kernel: AttentionKernel, settings: Settings, plan: AttentionPlan) -> Timing:
    """Return the time of all that one rank computes, with a network that takes no time."""
    exchange = _Instant(settings, plan) if plan.exchanges else None
    context = AttentionContext(plan, kernel, settings.timing_heads.head_dim**-0.5, exchange)
    what = "whole CSBP rank" if exchange else "whole sequence, one rank"
    inputs = _projections(settings, plan.rows.num_rows)

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return block_diffusion_attention(query, key, value, context)

    return _time_autograd(what, kernel.name, settings, plan, plan.num_pairs, forward, inputs)


def _time_causal(kernel: AttentionKernel, settings: Settings, plan: AttentionPlan) -> Timing:
    """Return the time of one plain causal call with about as many pairs as the rank computes."""
    rows = yardstick_rows(plan.num_pairs)
    query, key, value = (tensor.transpose(0, 1) for tensor in _projections(settings, rows))
    scale = settings.timing_heads.head_dim**-0.5
    out, lse = kernel.forward(query, key, value, causal=True, scale=scale)

    def forward() -> None:
        kernel.forward(query, key, value, causal=True, scale=scale)

    def backward() -> None:
        kernel.backward(query, query, key, value, out, lse, causal=True, scale=scale)

    times = (_median_ms(forward, settings), _median_ms(backward, settings))
    what = "plain causal attention of equal work"
    return _timing(what, kernel.name, settings, plan, rows * (rows + 1) // 2, times, None)


def yardstick_rows(pairs: int) -> int:
    """Return how many rows a causal square of so many pairs has, to the nearest multiple of 128.

    At other lengths backends take a slower operator or mask, which would flatter whatever is held against it.
    """
    side: float = (2 * pairs) ** 0.5
    return max(1, round(side / 128)) * 128


class _Instant:
    """Stands for a network that takes no time."""

    def __init__(self, settings: Settings, plan: AttentionPlan) -> None:
        self._gathered = _projections(settings, plan.rows.sample.length)[1:]

    def start_gathers(
        self, tensors_SBKD: Sequence[Tensor], transfers: Transfers
    ) -> Sequence[PendingWork[list[Tensor]]]:
        """See `KeyValueExchange.start_gathers`."""
        return [PendingWork([], lambda: self._gathered) for _ in transfers]

    def start_reduces(
        self,
        buffers_RBKD: Sequence[Sequence[Tensor]],
        totals_SBKD: Sequence[Tensor],
        transfers: Transfers,
        payload_dtype: torch.dtype,
    ) -> Sequence[PendingWork[None]]:
        """See `KeyValueExchange.start_reduces`: this rank's own gradients come back, and are added."""
        (_, transfer), (buffers,) = *transfers, buffers_RBKD
        payloads_RBKD = [buffer.to(payload_dtype) for buffer in buffers]

        def finish() -> None:
            for total, buffer in zip(totals_SBKD, payloads_RBKD, strict=True):
                for section, (row, length) in zip(buffer.chunk(len(transfer.parts)), transfer.parts, strict=True):
                    total.narrow(0, row, length).add_(section[:length])

        return [PendingWork([], finish)]


def _projections(settings: Settings, rows: int) -> list[Tensor]:
    """Return query, key and value [rows, 1, heads, D] in bf16."""
    heads = settings.timing_heads
    counts = (heads.num_query_heads, heads.num_key_value_heads, heads.num_key_value_heads)
    shapes = [(rows, 1, count, heads.head_dim) for count in counts]
    return [torch.randn(shape, dtype=torch.bfloat16, device=settings.device) for shape in shapes]


def _time_autograd(
    what: str,
    backend: str,
    settings: Settings,
    plan: AttentionPlan,
    pairs: int,
    forward: Callable[[Tensor, Tensor, Tensor], Tensor],
    inputs: Sequence[Tensor],
) -> Timing:
    """Return the times of a differentiable function and of its backward pass, and the peak memory of both."""
    query, key, value = (tensor.requires_grad_() for tensor in inputs)
    on_gpu = settings.device.type == "cuda"
    before = torch.cuda.memory_allocated(settings.device) if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(settings.device)
    grad_out = torch.randn_like(query)
    times: list[tuple[float, float]] = []
    for _ in range(1 + settings.repeats):
        started = _now(settings)
        out = forward(query, key, value)
        between = _now(settings)
        torch.autograd.grad(out, (query, key, value), grad_out)
        times.append((between - started, _now(settings) - between))
    peak = (torch.cuda.max_memory_allocated(settings.device) - before) / 2**30 if on_gpu else None
    forward_ms, backward_ms = (statistics.median(pass_times) for pass_times in zip(*times[1:], strict=True))
    return _timing(what, backend, settings, plan, pairs, (forward_ms, backward_ms), peak)


def _median_ms(function: Callable[[], object], settings: Settings) -> float:
    """Return the median time of a call, after one to warm up."""
    function()
    times = []
    for _ in range(settings.repeats):
        started = _now(settings)
        function()
        times.append(_now(settings) - started)
    return statistics.median(times)


def _now(settings: Settings) -> float:
    """Return the time in ms, once the device has done all that was asked of it."""
    if settings.device.type == "cuda":
        torch.cuda.synchronize(settings.device)
    return 1e3 * time.perf_counter()


def _timing(
    what: str,
    backend: str,
    settings: Settings,
    plan: AttentionPlan,
    pairs: int,
    times: tuple[float, float],
    peak_gib: float | None,
) -> Timing:
    products = _FORWARD_PRODUCTS + _BACKWARD_PRODUCTS
    operations = 2 * products * pairs * settings.timing_heads.head_dim * settings.timing_heads.num_query_heads
    return Timing(
        what=what,
        backend=backend,
        length=plan.rows.sample.length,
        group_size=plan.rows.sharding.group_size,
        forward_ms=round(times[0], 3),
        backward_ms=round(times[1], 3),
        tflops=round(operations / sum(times) / 1e9, 1),
        peak_gib=None if peak_gib is None else round(peak_gib, 2),
    )
