# SPDX-License-Identifier: Apache-2.0
"""Which of the packed samples, and which rank, stand for a job."""

from dataclasses import replace

import numpy as np

from megatron_csbp.tools.dry_run.job import Job
from megatron_csbp.tools.dry_run.packed import PackedSample, representatives
from megatron_csbp.tools.dry_run.plan import make_plan
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import BlockAssignment
from tests.unit_tests.tools.dry_run.jobs import CLUSTER, CP, NEMOTRON_3B, job

LENGTH, BLOCK = 1024, 64


def packed(*blocks: int) -> PackedSample:
    """Return a sample of two documents, half and half, of which these blocks have corrupted rows."""
    active = np.zeros((1, LENGTH // BLOCK), dtype=np.bool_)
    active[0, list(blocks)] = True
    documents = np.array([[0, LENGTH // 2], [LENGTH // 2, LENGTH]])
    return PackedSample(Sample(LENGTH, BLOCK, 1, documents, active), 10 * len(blocks), BLOCK * len(blocks))


def packed_job(*samples: PackedSample) -> Job:
    whole = job(
        NEMOTRON_3B, LENGTH, 2, CP, gpus=2, assignment=BlockAssignment.CONTIGUOUS, block_size=BLOCK, loss_rows=0
    )
    return replace(whole, packed=representatives(samples))


def test_the_median_and_the_fullest_of_the_samples_stand_for_all() -> None:
    samples = [packed(*range(count)) for count in (4, 1, 16, 2, 3)]
    found = representatives(samples)
    assert (found.number, found.median.active, found.fullest.active) == (5, 3, 16)
    assert found.fullest.rows == LENGTH + 16 * BLOCK


def test_time_goes_by_the_rank_with_most_pairs_and_memory_by_that_with_most_rows() -> None:
    """In the CP baseline blocks stay where their chunk is: three early ones on rank 0, two late ones on rank 1."""
    found = packed_job(packed(0, 1, 2, 14, 15))
    assert (found.planned_rank, found.of_fullest_sample().planned_rank) == (1, 0)
    assert (found.rows, found.of_fullest_sample().rows) == (LENGTH // 2 + 2 * BLOCK, LENGTH // 2 + 3 * BLOCK)


def test_a_plan_has_the_memory_of_the_fullest_sample() -> None:
    few, many = packed(0), packed(*range(16))
    plan = make_plan(packed_job(few, few, many), CLUSTER)
    alone, fullest = (make_plan(packed_job(sample), CLUSTER) for sample in (few, many))
    assert plan.fullest.total == fullest.fullest.total > alone.fullest.total
    assert plan.time == alone.time
    assert plan.operations.attention == alone.operations.attention < fullest.operations.attention
