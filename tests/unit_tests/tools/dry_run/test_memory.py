# SPDX-License-Identifier: Apache-2.0
"""Memory of attention against an allocation meter, at full size without memory; pipelines; what fits."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_csbp.tools.attention_step import attention_step, fake_group
from megatron_csbp.tools.dry_run.memory import activation_bytes, in_flight, rank_memories, state_bytes
from megatron_csbp.tools.dry_run.topology import Recompute, Topology
from megatron_csbp.tools.dry_run.workspace import mixer_memory
from megatron_csbp.tools.flops import ModelShape
from megatron_csbp.tools.memory_meter import AllocationMeter
from megatron_csbp.transformer.geometry.scheme import Scheme
from tests.unit_tests.tools.dry_run.jobs import BP, CLUSTER, CP, CSBP, job

SHAPE = ModelShape(
    num_layers=1,
    hidden_size=1,
    ffn_hidden_size=1,
    num_query_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=1,
)


class AllocatingKernel:
    """Allocates what a fused kernel on CUDA does: copies in one piece, gradients, an fp32 sum of query gradients."""

    name = "allocating"

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        query = query.contiguous()
        return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)

    def backward(self, *tensors: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        copies = [tensor.contiguous() for tensor in tensors]
        summed = torch.empty(copies[1].shape, dtype=torch.float32, device=copies[1].device)
        assert summed.dtype is torch.float32
        query, key, value = (torch.empty_like(tensor) for tensor in copies[1:4])
        return query, key, value


@pytest.mark.parametrize(
    "scheme, context, groups, tolerance",
    [
        (CSBP, 8, 1, 0.01),
        (CSBP, 8, 2, 0.01),
        (CSBP, 8, 4, 0.01),
        (CSBP, 2, 4, 0.01),
        (CP, 8, 2, 0.03),
        (CP, 8, 1, 0.11),  # of the corrupted keys, what nobody reads
        (BP, 8, 1, 0.01),
        (Scheme.SINGLE, 1, 1, 0.01),
    ],
)
def test_attention_allocates_what_the_planner_says(
    scheme: Scheme, context: int, groups: int, tolerance: float
) -> None:
    recompute = Recompute()
    found = job(length=32_768, context=context, scheme=scheme, block_size=32, head_groups=groups, recompute=recompute)
    layer = found.network.layers[0]
    with fake_group(context, context - 1) as group:
        step = attention_step(found.plan(layer), SHAPE, group, num_head_groups=groups, kernel=AllocatingKernel())
        with AllocationMeter() as meter:
            step()
    output = found.rows * (2 * 32 * 128 + 4 * 32)  # with the log-sum-exp; keys and queries were there before
    assert output + mixer_memory(found, layer).total == pytest.approx(meter.peak_bytes, rel=tolerance)


@pytest.mark.parametrize(
    "pipeline, virtual, stage, micro_batches, expected",
    [
        (1, 1, 0, 8, 1),
        (4, 1, 0, 8, 4),
        (4, 1, 3, 8, 1),
        (4, 1, 0, 2, 2),
        (4, 2, 0, 8, 2 * 3 + 4 + 1),
        (4, 2, 3, 8, 4 + 1),
    ],
)
def test_micro_batches_in_flight_are_those_of_megatron_s_schedule(
    pipeline: int, virtual: int, stage: int, micro_batches: int, expected: int
) -> None:
    topology = Topology(gpus=4 * pipeline, context=4, pipeline=pipeline, virtual=virtual, scheme=CSBP)
    found = replace(job(length=32_768), topology=topology, global_batch=micro_batches)
    assert in_flight(found, stage) == expected


def test_full_recomputation_keeps_the_input_of_each_layer() -> None:
    kept = activation_bytes(job(), 0)
    assert kept == {"activations: inputs of recomputed layers": 40 * 65_536 * 5120 * 2}


def test_ranks_share_the_optimizer_only_if_it_is_distributed() -> None:
    shared, whole = (state_bytes(job(distributed_optimizer=shares), 0) for shares in (True, False))
    assert whole["optimizer"] == 16 * shared["optimizer"] == 12 * 13_506_073_600
    assert shared["weights"] == 2 * 13_506_073_600
    assert shared["gradients"] == 4 * 13_506_073_600


def test_what_does_not_fit_is_said_by_kind_of_rank() -> None:
    gpu = CLUSTER.tables.gpu("h200")
    (found,) = rank_memories(job(scheme=BP), gpu)
    assert (found.kind, found.fits) == ("every rank", False)
    assert found.total == sum(found.held.values()) + sum(found.moments[found.fullest].values())
    assert rank_memories(job(), gpu)[0].fits
