# SPDX-License-Identifier: Apache-2.0
"""Step times of CP, BP and CSBP side by side: the same layers, kernels and overlap on the same slow link."""

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import RankWorld
from benchmarks.stack import Checksums, Shape, Stack, Variant, make_context, make_plan
from megatron_csbp.transformer.attention import AttentionContext
from megatron_csbp.transformer.communication import ContextGroupExchange
from megatron_csbp.transformer.geometry.plan import AttentionPlan
from megatron_csbp.transformer.kernels.torch_kernel import TorchCpuKernel
from megatron_csbp.transformer.wait_clock import HostClock, WaitClock

CALIBRATION_ROWS = 1024
CALIBRATION_REPEATS = 3
SAME_WORK_TOLERANCE = 1e-3
FLOPS_A_PAIR = 14
"""Per pair and element of all query heads: two products forward (4), five backward (10)."""


@dataclass(frozen=True)
class Comparison:
    """What one world of ranks runs.

    Attributes:
        sequence_length: L.
        variants: the schemes, run in turn.
        repeats: how often each is timed.
        shape: sizes of the layers.
    """

    sequence_length: int
    variants: tuple[Variant, ...]
    repeats: int
    shape: Shape = field(default_factory=Shape)


def calibrate(world: RankWorld, shape: Shape) -> float:
    """Return the attention FLOP/s, forward and backward, of this rank's core while all ranks compute."""
    kernel, rows = TorchCpuKernel(), CALIBRATION_ROWS
    query, grad = (torch.randn(1, rows, shape.num_heads, shape.head_dim) for _ in range(2))
    key, value = (torch.randn(1, rows, shape.num_key_value_heads, shape.head_dim) for _ in range(2))
    scale = shape.head_dim**-0.5

    def run() -> float:
        started = time.perf_counter()
        out, lse = kernel.forward(query, key, value, causal=False, scale=scale)
        kernel.backward(grad, query, key, value, out, lse, causal=False, scale=scale)
        return time.perf_counter() - started

    run()
    dist.barrier(group=world.group)
    seconds = statistics.median(run() for _ in range(CALIBRATION_REPEATS))
    return FLOPS_A_PAIR * rows**2 * shape.num_heads * shape.head_dim / seconds


@dataclass
class Timings:
    """Seconds of one variant on one rank, one entry a repeat."""

    step: list[float] = field(default_factory=list)
    blocked: list[float] = field(default_factory=list)
    network_alone: list[float] = field(default_factory=list)
    checksums: list[Checksums] = field(default_factory=list)


def compare(world: RankWorld, comparison: Comparison) -> dict[str, Timings]:
    """Time every variant on this rank, in turn: a busy minute of the machine hits all of them alike."""
    exchange, clock = ContextGroupExchange(world.group), HostClock()
    exchange.clock = clock
    stack = Stack(comparison.shape, comparison.sequence_length)
    timings = {variant.name: Timings() for variant in comparison.variants}
    contexts = {}
    for variant in comparison.variants:
        plan = make_plan(variant, comparison.shape, comparison.sequence_length, world.size, world.rank)
        contexts[variant.name] = make_context(plan, comparison.shape, exchange, variant)
    order = list(contexts.items())
    for repeat in range(-1, comparison.repeats):
        order.append(order.pop(0))
        for name, context in order:
            seconds, blocked, checksums = _timed_step(world, stack, context, clock)
            alone = _network_alone(world, comparison.shape, context.plan, exchange)
            if repeat >= 0:  # the first warms up memory and connections
                timings[name].step.append(seconds)
                timings[name].blocked.append(blocked)
                timings[name].network_alone.append(alone)
                timings[name].checksums.append(checksums)
    return timings


def _timed_step(
    world: RankWorld, stack: Stack, context: AttentionContext, clock: WaitClock
) -> tuple[float, float, Checksums]:
    """Return seconds of one step, seconds blocked on the network, and this rank's shares of the checksums."""
    dist.barrier(group=world.group)
    clock.take_seconds()
    started = time.perf_counter()
    loss = stack.step(context)
    return time.perf_counter() - started, clock.take_seconds(), stack.checksums(loss)


def _network_alone(world: RankWorld, shape: Shape, plan: AttentionPlan, exchange: ContextGroupExchange) -> float:
    """Return the seconds that the exchanges of one step take when nothing is computed beside them."""
    if not plan.exchanges:
        return 0.0
    local = [torch.zeros(plan.rows.num_rows, 1, shape.num_key_value_heads, shape.head_dim) for _ in range(2)]
    totals = [torch.zeros_like(tensor) for tensor in local]
    buffers = [
        [torch.zeros(transfer.num_rows, 1, *tensor.shape[2:]) for tensor in local] for _, transfer in plan.transfers
    ]
    dist.barrier(group=world.group)
    started = time.perf_counter()
    for _ in range(shape.num_layers):
        for _ in ("forward", "backward"):
            for gather in exchange.start_gathers(local, plan.transfers):
                gather.wait()
        for reduce in exchange.start_reduces(buffers, totals, plan.transfers, torch.float32):
            reduce.wait()
    return time.perf_counter() - started


def summarise(comparison: Comparison, by_rank: list[dict[str, Timings]]) -> list[dict[str, Any]]:
    """Return a row for each variant: medians over repeats of the slowest rank's step, and where its time went."""
    rows = []
    for variant in comparison.variants:
        ranks = [timings[variant.name] for timings in by_rank]
        steps = [max(times) for times in zip(*(rank.step for rank in ranks), strict=True)]
        step = statistics.median(steps)
        # The split is the mean over ranks: a rank that finishes its tiles early waits for the late one.
        exposed = statistics.fmean(statistics.median(rank.blocked) for rank in ranks)
        alone = statistics.fmean(statistics.median(rank.network_alone) for rank in ranks)
        rows.append(
            {
                "variant": variant.name,
                "sequence_length": comparison.sequence_length,
                "ranks": len(by_rank),
                "step_seconds": step,
                "step_seconds_all": steps,
                "tokens_per_second": comparison.sequence_length / step,
                "compute_seconds": step - exposed,
                "exposed_seconds": exposed,
                "hidden_seconds": max(0.0, alone - exposed),
                "network_alone_seconds": alone,
                "loss": sum(rank.checksums[-1].loss for rank in ranks),
                "gradients": sum(rank.checksums[-1].gradients for rank in ranks),
            }
        )
    _check_same_work(rows)
    return rows


def _check_same_work(rows: list[dict[str, Any]]) -> None:
    """Refuse to compare schemes that have not computed the same.

    Raises:
        RuntimeError: a loss or a checksum of gradients differs.
    """
    for row in rows[1:]:
        for field_name in ("loss", "gradients"):
            expected, found = rows[0][field_name], row[field_name]
            if abs(found - expected) > SAME_WORK_TOLERANCE * abs(expected):
                raise RuntimeError(
                    f"{row['variant']} and {rows[0]['variant']} differ in {field_name}: {found}, {expected}"
                )
