# SPDX-License-Identifier: Apache-2.0
"""Makes each evaluation under `--full-validation` read the whole validation set once, in every topology.

Megatron 0.19.2 gives each data-parallel rank batches of one sample, counts an evaluation's iterations by those
batches, and then takes a batch for every micro-batch of an iteration: a set is read again for each micro-batch, ranks
that have fewer samples than others read theirs more often, and a rank without any sample ends the run. There is no
seam for the sampler, so the class that Megatron's loader takes is replaced.
"""

import functools
import math
from argparse import Namespace
from collections.abc import Iterator, Sized

SampleIndex = int | None
"""Index of a sample, or None for a sample without loss that fills a batch (as in Megatron's own datasets)."""


class WholeSetSampler(Sized):
    """The micro-batches of one evaluation for one data-parallel rank: together all ranks read each sample once.

    Its length is the number of Megatron's evaluation iterations; it yields all their micro-batches. Batches are full;
    what lies behind the last sample is None.

    Args:
        total_samples: samples in the set.
        data_parallel_rank: this rank.
        data_parallel_size: ranks that share the set.
        micro_batch_size: samples of a rank in a micro-batch.
        num_micro_batches: micro-batches in an evaluation iteration.
    """

    def __init__(
        self,
        total_samples: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        *,
        micro_batch_size: int,
        num_micro_batches: int,
    ) -> None:
        self._total_samples = total_samples
        self._first = data_parallel_rank * micro_batch_size
        self._of_all_ranks = data_parallel_size * micro_batch_size
        self._micro_batch_size = micro_batch_size
        self._num_micro_batches = num_micro_batches

    def __len__(self) -> int:
        """Return the number of evaluation iterations."""
        return math.ceil(self._total_samples / (self._of_all_ranks * self._num_micro_batches))

    def __iter__(self) -> Iterator[list[SampleIndex]]:
        """Yield the sample indices of each micro-batch."""
        for number in range(len(self) * self._num_micro_batches):
            first = number * self._of_all_ranks + self._first
            indices = range(first, first + self._micro_batch_size)
            yield [index if index < self._total_samples else None for index in indices]


def correct_full_validation_now(args: Namespace) -> None:
    """Let Megatron's loaders read validation sets through `WholeSetSampler`.

    Args:
        args: Megatron's validated arguments.

    Raises:
        ValueError: the pipeline is interleaved, where Megatron takes the loaders of virtual stages for those of sets.
    """
    if args.virtual_pipeline_model_parallel_size is not None:
        raise ValueError(
            f"--full-validation with {args.virtual_pipeline_model_parallel_size} virtual pipeline stages on a rank: "
            "Megatron 0.19 takes the loaders of virtual stages for those of validation sets. Use --eval-iters, or "
            "a pipeline without virtual stages (leave out --num-layers-per-virtual-pipeline-stage, "
            "--num-virtual-stages-per-pipeline-rank, or the | of --pipeline-model-parallel-layout)."
        )
    of_all_ranks = args.eval_micro_batch_size * args.data_parallel_size
    sampler = functools.partial(
        WholeSetSampler,
        micro_batch_size=args.eval_micro_batch_size,
        num_micro_batches=args.eval_global_batch_size // of_all_ranks,
    )
    from megatron.training.datasets import data_samplers as module

    setattr(module, "MegatronFullValidationSampler", sampler)  # noqa: B010
