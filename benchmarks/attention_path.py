# SPDX-License-Identifier: Apache-2.0
"""The CPU path of one CSBP rank's attention against plain causal flash attention with the same number of pairs.

Shapes: S local rows, R rows of the gather buffer, C chunk length, N query heads, K key/value heads, D head dim.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.ranks import RankWorld
from benchmarks.stack import CSBP_AT_ONCE, Shape, make_context, make_plan
from megatron_csbp.transformer.attention import block_diffusion_attention
from megatron_csbp.transformer.communication import PendingWork, Transfers
from megatron_csbp.transformer.geometry.plan import AttentionPlan
from megatron_csbp.transformer.kernels.interface import AttentionKernel
from megatron_csbp.transformer.kernels.torch_kernel import TorchCpuKernel

GROUP_SIZE = 2
COPIES = ("aten.copy_.default", "aten.clone.default", "aten._to_copy.default")


@dataclass(frozen=True)
class OnePeerExchange:
    """Stands in for the network: other ranks hold what this one holds, so only the copying is real."""

    size: int

    def start_gathers(
        self, tensors_SBKD: Sequence[Tensor], transfers: Transfers
    ) -> Sequence[PendingWork[list[Tensor]]]:
        """See `KeyValueExchange.start_gathers`."""
        ((_, transfer),) = transfers  # the clean copy's
        buffers_RBKD = []
        for tensor_SBKD in tensors_SBKD:
            buffer_RBKD = tensor_SBKD.new_empty(transfer.num_rows, *tensor_SBKD.shape[1:])
            for half, (row, length) in zip(buffer_RBKD.chunk(2), transfer.parts, strict=True):
                half.unflatten(0, (self.size, -1)).copy_(tensor_SBKD.narrow(0, row, length))
            buffers_RBKD.append(buffer_RBKD)
        return [PendingWork([], lambda: buffers_RBKD)]

    def start_reduces(
        self,
        buffers_RBKD: Sequence[Sequence[Tensor]],
        totals_SBKD: Sequence[Tensor],
        transfers: Transfers,
        payload_dtype: torch.dtype,
    ) -> Sequence[PendingWork[None]]:
        """See `KeyValueExchange.start_reduces`."""
        ((_, transfer),), (buffers,) = transfers, buffers_RBKD
        payloads = [buffer.to(payload_dtype) for buffer in buffers]

        def finish() -> None:
            for total, payload in zip(totals_SBKD, payloads, strict=True):
                halves = payload.unflatten(0, (2, self.size, -1))
                for half, (row, length) in zip(halves, transfer.parts, strict=True):
                    total.narrow(0, row, length).add_(half.sum(0, dtype=total.dtype))

        return [PendingWork([], finish)]


@dataclass
class CountingKernel:
    """Counts the calls of the kernel behind it."""

    inner: TorchCpuKernel
    calls: int = 0
    name: str = "counting"

    def forward(self, *tensors: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """See `AttentionKernel.forward`."""
        self.calls += 1
        return self.inner.forward(*tensors, causal=causal, scale=scale)

    def backward(self, *tensors: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """See `AttentionKernel.backward`."""
        self.calls += 1
        return self.inner.backward(*tensors, causal=causal, scale=scale)


class NoKernel:
    """Returns tensors of the right shapes at once: what remains is the work around the kernels."""

    name = "none"

    def forward(self, *tensors: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """See `AttentionKernel.forward`."""
        query = tensors[0]
        return torch.empty_like(query), query.new_zeros(query.shape[:-1])

    def backward(self, *tensors: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """See `AttentionKernel.backward`."""
        _, query, key, value, *_ = tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class OperatorCounter(TorchDispatchMode):
    """Counts the operators that run, and the bytes that copies write."""

    def __init__(self) -> None:
        """Start with nothing counted."""
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.copied_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count and run one operator."""
        result = func(*args, **(kwargs or {}))
        self.calls[str(func)] += 1
        if str(func) in COPIES:
            self.copied_bytes += result.nbytes
        return result


def measure_attention_path(world: RankWorld, sequence_length: int, repeats: int) -> dict[str, Any]:
    """Time one attention layer of the last CSBP rank, forward and backward, without a network.

    Args:
        world: a single rank, for its core.
        sequence_length: L.
        repeats: timed runs of each; they alternate.
    """
    shape = Shape()
    plan = make_plan(CSBP_AT_ONCE, shape, sequence_length, GROUP_SIZE, GROUP_SIZE - 1)
    # The same schedule with one-token blocks, a head of 8 numbers and no kernel: all the calls, hardly any arithmetic.
    tiny = replace(shape, block_size=1, num_heads=1, num_key_value_heads=1, head_dim=8)
    tiny_plan = make_plan(CSBP_AT_ONCE, tiny, sequence_length // shape.block_size, GROUP_SIZE, GROUP_SIZE - 1)
    assert len(tiny_plan.tiles) == len(plan.tiles), "the small schedule has other calls"
    runs = {
        "csbp": _attention_run(plan, shape),
        "flash": _flash_run(isqrt(2 * plan.num_pairs), shape),
        "dispatch": _attention_run(tiny_plan, tiny, NoKernel()),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(-1, repeats):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            if repeat >= 0:
                seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "sequence_length": sequence_length,
        "block_size": shape.block_size,
        "tiles": len(plan.tiles),
        "pairs": plan.num_pairs,
        **{f"{name}_seconds": median for name, median in medians.items()},
        "to_flash": medians["csbp"] / medians["flash"],
        "dispatch_share": medians["dispatch"] / medians["csbp"],
        **_count_calls(plan, shape),
    }


def _attention_run(plan: AttentionPlan, shape: Shape, kernel: AttentionKernel | None = None) -> Callable[[], None]:
    """Return a call that runs one layer's attention forward and backward."""
    context = make_context(plan, shape, OnePeerExchange(plan.rows.sharding.group_size), CSBP_AT_ONCE)
    if kernel is not None:
        context = replace(context, kernel=kernel)
    rows = plan.rows.num_rows
    query, key, value = (
        torch.randn(rows, 1, heads, shape.head_dim, requires_grad=True)
        for heads in (shape.num_heads, shape.num_key_value_heads, shape.num_key_value_heads)
    )
    grad = torch.randn(rows, 1, shape.num_heads, shape.head_dim)

    def run() -> None:
        out = block_diffusion_attention(query, key, value, context)
        torch.autograd.grad(out, (query, key, value), grad)

    return run


def _flash_run(length: int, shape: Shape) -> Callable[[], None]:
    """Return a call that runs plain causal flash attention of a sequence forward and backward."""
    query, key, value = (
        torch.randn(1, length, heads, shape.head_dim)
        for heads in (shape.num_heads, shape.num_key_value_heads, shape.num_key_value_heads)
    )
    grad, kernel, scale = torch.randn_like(query), TorchCpuKernel(), shape.head_dim**-0.5

    def run() -> None:
        out, lse = kernel.forward(query, key, value, causal=True, scale=scale)
        kernel.backward(grad, query, key, value, out, lse, causal=True, scale=scale)

    return run


def _count_calls(plan: AttentionPlan, shape: Shape) -> dict[str, int]:
    """Return what one layer's forward and backward pass calls."""
    kernel = CountingKernel(TorchCpuKernel())
    run = _attention_run(plan, shape, kernel)
    with OperatorCounter() as counter:
        run()
    return {
        "kernel_calls": kernel.calls,
        "operator_calls": counter.calls.total(),
        "merges": counter.calls["aten.lerp_.Tensor"],
        "copies": sum(counter.calls[name] for name in COPIES),
        "copied_bytes": counter.copied_bytes,
    }
