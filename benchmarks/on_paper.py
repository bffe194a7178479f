# SPDX-License-Identifier: Apache-2.0
"""What needs no network and no clock: memory and useful work of one attention layer, and the planner at cluster sizes.

The real attention runs on tensors without data (meta tensors) in a group without other ranks, so any size fits.

Shapes: G independent problems of one tile, T rows, U keys, N query heads, D head dim.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from benchmarks.links import ACROSS_NODES, H200_ATTENTION_FLOPS, NVLINK
from benchmarks.planned_rows import MODELS, PlanRow, plan_rows
from benchmarks.stack import BP, CP, CP_AT_ONCE, CSBP, CSBP_AT_ONCE, CSBP_CONTIGUOUS, Variant
from megatron_csbp.tools.attention_step import attention_step, fake_group
from megatron_csbp.tools.flops import attention_work
from megatron_csbp.tools.memory_meter import AllocationMeter, SavedActivations
from megatron_csbp.transformer.geometry.layer_plans import layer_plans
from megatron_csbp.transformer.geometry.plan import AttentionPlan
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import Sharding
from megatron_csbp.transformer.geometry.transfers import row_bytes
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask, allowed_pairs
from megatron_csbp.transformer.head_groups import default_head_groups
from megatron_csbp.transformer.kernels.interface import AttentionKernel
from megatron_csbp.transformer.kernels.torch_kernel import TorchCpuKernel

MODEL = "nemotron-14b"
BLOCK_SIZE = 32
BF16_BYTES = 2
MEMORY_GROUP_SIZE = 8
WORK_GROUP_SIZE = 4
SQUARE_LENGTH = 32_768
"""From here on a tensor with L x L elements can only be one of scores or of a mask, and there may be none."""


def sharding_of(variant: Variant, group_size: int) -> Sharding:
    """Return how a variant spreads a sequence."""
    return Sharding(group_size, variant.scheme, variant.assignment)


def plan_of(variant: Variant, length: int, group_size: int, rank: int, clean: CleanAttention) -> AttentionPlan:
    """Return one rank's plan."""
    return layer_plans(Sample(length, BLOCK_SIZE), sharding_of(variant, group_size), rank).plan(Mask(clean))


def measure_memory(lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Return what one attention layer of the last rank saves and allocates, in bf16, for each length and scheme.

    Heads are exchanged in as many groups as training chooses for such sizes, and once more all at once.

    Raises:
        RuntimeError: a tensor has L x L elements, or CSBP needs more than CP.
    """
    rows: list[dict[str, Any]] = []
    for length in lengths:
        for variant in (CP, BP, CSBP, CP_AT_ONCE, CSBP_AT_ONCE):
            rank = MEMORY_GROUP_SIZE - 1
            plan = plan_of(variant, length, MEMORY_GROUP_SIZE, rank, CleanAttention.BLOCK_CAUSAL)
            head_groups = 1 if variant in (CP_AT_ONCE, CSBP_AT_ONCE) else chosen_head_groups(plan)
            with fake_group(MEMORY_GROUP_SIZE, rank) as group:
                step = attention_step(plan, MODELS[MODEL], group, num_head_groups=head_groups)
                with SavedActivations() as saved, AllocationMeter() as meter:
                    step()
            if length >= SQUARE_LENGTH and meter.largest_elements >= length**2:
                raise RuntimeError(f"{variant.name}, L = {length}: a tensor has {meter.largest_elements} elements")
            rows.append(
                {
                    "sequence_length": length,
                    "variant": variant.name,
                    "head_groups": head_groups,
                    "saved_bytes": saved.total_bytes,
                    "peak_bytes": meter.peak_bytes,
                    "largest_elements": meter.largest_elements,
                }
            )
        cp, _, csbp, *_ = rows[-5:]
        if csbp["saved_bytes"] > cp["saved_bytes"] or csbp["peak_bytes"] > cp["peak_bytes"]:
            raise RuntimeError(f"CSBP needs more memory than CP: {csbp}, {cp}")
    return rows


def chosen_head_groups(plan: AttentionPlan) -> int:
    """Return how many head groups training would choose for the model, without recomputation."""
    shape = MODELS[MODEL]
    clean_bytes = plan.clean.buffer_bytes(row_bytes(shape.num_key_value_heads, shape.head_dim, BF16_BYTES))
    return default_head_groups(shape.num_key_value_heads, clean_bytes, recomputes=False)


@dataclass
class PairCounter:
    """Counts the pairs of the kernel calls that really happen, from their shapes.

    Attributes:
        inner: the kernel.
        pairs: query-key pairs of the forward calls, for one head.
        num_query_heads: N.
    """

    num_query_heads: int
    inner: AttentionKernel = field(default_factory=TorchCpuKernel)
    pairs: int = 0
    name: str = "counting"

    def forward(self, *tensors: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """See `AttentionKernel.forward`."""
        (problems, rows, heads), keys = tensors[0].shape[:3], tensors[1].shape[1]
        pairs = problems * (rows * (rows + 1) // 2 if causal else rows * keys)
        self.pairs += pairs * heads // self.num_query_heads  # small tiles have query heads as further rows
        return self.inner.forward(*tensors, causal=causal, scale=scale)

    def backward(self, *tensors: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """See `AttentionKernel.backward`."""
        return self.inner.backward(*tensors, causal=causal, scale=scale)


def measure_useful_work(blocks_per_chunk: Sequence[int]) -> list[dict[str, Any]]:
    """Return pairs computed over pairs allowed, and the balance between ranks, for each scheme and clean mask."""
    rows = []
    for blocks in blocks_per_chunk:
        length = 2 * WORK_GROUP_SIZE * blocks * BLOCK_SIZE
        sample = Sample(length, BLOCK_SIZE)
        for clean_attention in CleanAttention:
            mask = Mask(clean_attention)
            for variant in (CP, BP, CSBP, CSBP_CONTIGUOUS):
                pairs = [_executed_pairs(variant, length, rank, clean_attention) for rank in range(WORK_GROUP_SIZE)]
                planned = attention_work(sample, sharding_of(variant, WORK_GROUP_SIZE), mask).pairs
                if tuple(pairs) != planned:
                    raise RuntimeError(f"{variant.name}: the kernels got {pairs} pairs and the plan says {planned}")
                rows.append(
                    {
                        "blocks_per_chunk": blocks,
                        "clean_attention": str(clean_attention),
                        "variant": variant.name,
                        "executed_to_allowed": sum(pairs) / allowed_pairs(sample, mask),
                        "max_to_min": max(pairs) / min(pairs),
                    }
                )
    return rows


def _executed_pairs(variant: Variant, length: int, rank: int, clean_attention: CleanAttention) -> int:
    plan = plan_of(variant, length, WORK_GROUP_SIZE, rank, clean_attention)
    counter = PairCounter(MODELS[MODEL].num_query_heads)
    with fake_group(WORK_GROUP_SIZE, rank) as group:
        attention_step(plan, MODELS[MODEL], group, kernel=counter)()
    return counter.pairs


def plan_at_scale(lengths: Sequence[int], group_sizes: Sequence[int]) -> dict[str, Any]:
    """Plan the Nemotron models at every length and group size; nothing is run."""
    started = time.perf_counter()
    rows = plan_rows(list(MODELS), lengths, group_sizes, BLOCK_SIZE, CleanAttention.TOKEN_CAUSAL)
    return {
        "seconds": time.perf_counter() - started,
        "slowest_plan_seconds": max(row.plan_seconds for row in rows),
        "rows": [asdict(row) | modelled_seconds(row) for row in rows],
    }


def modelled_seconds(row: PlanRow) -> dict[str, float]:
    """Return the seconds of a step's computation and of its exchanges on H200s: modelled from published rates."""
    return {
        "modelled_compute_seconds": (row.attention_flops + row.linear_flops) / H200_ATTENTION_FLOPS,
        "modelled_nvlink_seconds": row.remote_bytes / (NVLINK.cluster_bytes or 1.0),
        "modelled_network_seconds": row.remote_bytes / (ACROSS_NODES.cluster_bytes or 1.0),
    }
