# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.training.datasets import data_samplers

from megatron_csbp.data.full_validation import WholeSetSampler, correct_full_validation_now

SIZES = st.integers(1, 5)


@given(samples=st.integers(1, 60), ranks=SIZES, micro_batch=SIZES, micro_batches=SIZES)
def test_ranks_read_every_sample_once_in_as_many_full_batches_as_megatron_takes(
    samples: int, ranks: int, micro_batch: int, micro_batches: int
) -> None:
    sizes = {"micro_batch_size": micro_batch, "num_micro_batches": micro_batches}
    samplers = [WholeSetSampler(samples, rank, ranks, **sizes) for rank in range(ranks)]
    read = [list(sampler) for sampler in samplers]
    # Megatron takes a batch for each micro-batch of len(loader) iterations, of every rank.
    iterations = -(-samples // (ranks * micro_batch * micro_batches))
    assert {len(sampler) for sampler in samplers} == {iterations}
    assert {len(batches) for batches in read} == {iterations * micro_batches}
    assert {len(batch) for batches in read for batch in batches} == {micro_batch}
    indices = [index for batches in read for batch in batches for index in batch]
    assert sorted(index for index in indices if index is not None) == list(range(samples))
    assert indices.count(None) < ranks * micro_batch * micro_batches


def args(**changes: object) -> SimpleNamespace:
    values = {"eval_micro_batch_size": 2, "eval_global_batch_size": 8, "data_parallel_size": 2}
    return SimpleNamespace(**{**values, "virtual_pipeline_model_parallel_size": None, **changes})


def test_megatrons_loader_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_samplers, "MegatronFullValidationSampler", None)
    correct_full_validation_now(args())  # type: ignore[arg-type]
    sampler = data_samplers.MegatronFullValidationSampler(total_samples=9, data_parallel_rank=1, data_parallel_size=2)
    assert len(sampler) == 2
    assert list(sampler) == [[2, 3], [6, 7], [None, None], [None, None]]


def test_an_interleaved_pipeline_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--full-validation with 2 virtual pipeline stages.*Use --eval-iters"):
        correct_full_validation_now(args(virtual_pipeline_model_parallel_size=2))  # type: ignore[arg-type]
