# SPDX-License-Identifier: Apache-2.0
"""Datasets of one rank's corrupted and clean rows, over Megatron's own GPT datasets.

Shapes: S local rows of a layout, B micro-batch.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.utils import Split
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training.datasets.data_samplers import RandomSeedDataset
from megatron.training.utils import get_blend_and_blend_per_split
from torch import Tensor

from megatron_csbp import megatron_compat
from megatron_csbp.data.dual_end_sampler import DualEndSampler
from megatron_csbp.data.noise import SampleNoise
from megatron_csbp.loss.objectives.interface import Objective
from megatron_csbp.transformer.layout import SequenceLayout

EVALUATION_SEED = 1234
"""Seed of validation and test noise in every run, so that evaluation losses compare across `--seed` too."""

_DATASET_FIELDS = {
    "split": "split",
    "multiple_validation_sets": "multiple_validation_sets",
    "full_validation": "full_validation",
    "num_dataset_builder_threads": "num_dataset_builder_threads",
    "path_to_cache": "data_cache_path",
    "mmap_bin_files": "mmap_bin_files",
    "eod_mask_loss": "eod_mask_loss",
    "object_storage_cache_path": "object_storage_cache_path",
    "mid_level_dataset_surplus": "mid_level_dataset_surplus",
    "fast_cache_load": "dataloader_fast_cache_load",
    "defer_npy_index_mmap": "dataloader_defer_npy_index_mmap",
}


class BlockDiffusionDataset(RandomSeedDataset):
    """One rank's rows of every sample, corrupted, with what they predict.

    It is a RandomSeedDataset so that Megatron's cyclic sampler (`--dataloader-type cyclic`, which repeats sample
    indices) tells it the epoch; but no global RNG is seeded or read: the epoch is the view in the noise's key. In
    evaluation the seed is fixed and the view is 0.

    An item holds `tokens`, `position_ids`, `labels` (targets), int64 [S]; `loss_weights`, float32 [S]; `num_tokens`
    and `num_supervised`, int64 scalars. The loader stacks them to [B, S] and [B].

    Args:
        dataset: Megatron's GPTDataset, MockGPTDataset or BlendedDataset of them.
        layout: the rank's rows.
        objective: the training objective.
        seed: seed of the training noise.
        padded_vocab_size: token ids must be below this.
    """

    def __init__(
        self, dataset: Any, layout: SequenceLayout, objective: Objective, *, seed: int, padded_vocab_size: int
    ) -> None:
        super().__init__(dataset, seed)
        self.sampler = DualEndSampler(dataset, layout, padded_vocab_size)
        self.objective = objective
        # The stock loader reads `split` to choose evaluation's batch sizes.
        self.split: Split = dataset.split if hasattr(dataset, "split") else dataset.index_split
        self._position_ids = torch.from_numpy(layout.positions.copy())
        # In shared memory, since persistent workers keep the copy of the dataset that they started with.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def set_epoch(self, epoch: int) -> None:
        """Take the epoch from Megatron's cyclic sampler."""
        super().set_epoch(epoch)
        self._epoch.fill_(epoch)

    def noise(self, sample_index: int) -> SampleNoise:
        """Return the noise of a sample in the present epoch."""
        if self.split is Split.train:
            return SampleNoise(self.base_seed, self.split.value, sample_index, int(self._epoch))
        return SampleNoise(EVALUATION_SEED, self.split.value, sample_index)

    def __getitem__(self, idx: int | None) -> dict[str, Tensor]:
        """Return one sample's rows; for None, as in Megatron's datasets, rows without loss that fill a batch."""
        if idx is None:
            return without_loss(self[0])
        idx = int(idx)
        layout = self.sampler.layout
        rows = self.objective.place(self.sampler.read(idx), self.noise(idx), layout)
        return {
            "tokens": torch.from_numpy(rows.tokens),
            "position_ids": self._position_ids,
            "labels": torch.from_numpy(rows.targets),
            "loss_weights": torch.from_numpy(rows.weights),
            "num_tokens": torch.tensor(rows.num_tokens),
            "num_supervised": torch.tensor(rows.num_supervised),
        }


def without_loss(item: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return an item that counts for nothing: no row of it carries loss, and it adds 0 to every denominator."""
    return item | {key: torch.zeros_like(item[key]) for key in ("loss_weights", "num_tokens", "num_supervised")}


def build_train_valid_test_datasets(
    args: Any,
    num_samples: Sequence[int | None],
    layout: SequenceLayout,
    objective: Objective,
    vp_stage: int | None = None,
    is_built: Callable[[], bool] | None = None,
) -> tuple[Any, Any, Any]:
    """Build the three datasets over Megatron's own, on every rank together (Megatron's builder has barriers).

    Args:
        args: Megatron's arguments, with `clean_seq_length`, the user's `--seq-length`.
        num_samples: samples to draw for training, validation and test; None for one epoch.
        layout: the rank's rows.
        objective: the training objective.
        vp_stage: virtual pipeline stage, or None.
        is_built: whether this rank reads data, True on global rank 0 at least. None for Megatron's rule: the first
            tensor-parallel rank of the first and the last pipeline stage.

    Returns:
        Training, validation and test datasets: a :class:`BlockDiffusionDataset`, None where the split or the rank has
        none, or a list of them for `--multiple-validation-sets`.

    Raises:
        ValueError: a flag is set that samples cannot be built for.
    """
    config = dataset_config(args)
    dataset_class = MockGPTDataset if args.mock_data else GPTDataset
    is_built = is_built or partial(megatron_compat.rank_loads_data, vp_stage)
    splits = BlendedMegatronDatasetBuilder(dataset_class, list(num_samples), is_built, config).build()

    def wrap(dataset: Any) -> Any:
        if isinstance(dataset, list):
            return [wrap(part) for part in dataset]
        if dataset is None:
            return None
        return BlockDiffusionDataset(
            dataset, layout, objective, seed=args.seed, padded_vocab_size=args.padded_vocab_size
        )

    train, valid, test = (wrap(dataset) for dataset in splits)
    return train, valid, test


def dataset_config(args: Any) -> GPTDatasetConfig:
    """Return the stock dataset configuration for clean samples of L tokens."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences_per_dataset = None
    if args.per_dataset_sequences_path is not None:
        sequences_per_dataset = json.loads(Path(args.per_dataset_sequences_path).read_text(encoding="utf-8"))
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.clean_seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        create_attention_mask=False,
        sequences_per_dataset=sequences_per_dataset,
        **{field: getattr(args, name) for field, name in _DATASET_FIELDS.items()},
    )
