# SPDX-License-Identifier: Apache-2.0
"""Reads of a job's documents as many as show what its packed samples are like."""

from argparse import Namespace
from collections.abc import Iterator

import numpy as np
from megatron.core.datasets.utils import Split

from megatron_csbp.configuration.objective_flags import objective_from_args
from megatron_csbp.data.datasets import BlockDiffusionDataset, dataset_config, training_blend
from megatron_csbp.data.indexed_files import open_indexed_files
from megatron_csbp.data.packed_dataset import PackedDataset
from megatron_csbp.data.packed_sampler import PackedSampler
from megatron_csbp.data.packing import WINDOW
from megatron_csbp.tools.dry_run.loss_rows import loss_rows
from megatron_csbp.tools.dry_run.packed import PackedSample, PackedSamples, representatives
from megatron_csbp.transformer.geometry.layer_plans import layer_plans
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import Sharding

_SAMPLES = 32
"""Samples that are looked at, over all datasets by their weights, or their sizes; at least one of each."""
_DATASETS = 8


def read_packed_samples(args: Namespace) -> PackedSamples:
    """Pack some documents of each training dataset as training does, and return the samples that stand for all.

    Args:
        args: Megatron's validated arguments, with `--pack-documents`.

    Raises:
        ValueError: a document is longer than a sample, and `--long-documents` refuses it.
    """
    prefixes, weights = training_blend(args)
    prefixes = prefixes[:_DATASETS]
    sizes = [open_indexed_files(prefix, "--data-path").num_tokens for prefix in prefixes]
    shares = np.array(sizes if weights is None else weights[:_DATASETS], dtype=np.float64)
    numbers = np.maximum(1, np.round(_SAMPLES * shares / shares.sum())).astype(int).tolist()
    found = zip(prefixes, numbers, strict=True)
    return representatives([sample for prefix, number in found for sample in _samples(prefix, number, args)])


def _samples(prefix: str, number: int, args: Namespace) -> Iterator[PackedSample]:
    config, generator = dataset_config(args), np.random.default_rng(args.seed)
    documents = PackedDataset.build_low_level_dataset(prefix, config)
    every = PackedDataset.numel_low_level_dataset(documents)
    some = np.sort(generator.choice(every, min(every, WINDOW), replace=False))
    packed = PackedDataset(documents, prefix, some, None, Split.train, config)
    whole = Sample(args.clean_seq_length, args.diffusion_block_size, args.corrupted_views)
    dataset = BlockDiffusionDataset(
        packed,
        layer_plans(whole, Sharding(), 0),
        objective_from_args(args),
        seed=args.seed,
        padded_vocab_size=args.padded_vocab_size,
        all_blocks=args.csbp_all_blocks,
    )
    assert isinstance(dataset.sampler, PackedSampler)
    for index in range(min(number, len(packed))):
        supervised = int(dataset.sampler.supervised(index).sum())
        yield PackedSample(dataset.plans(index).rows.sample, *loss_rows(args, supervised))
