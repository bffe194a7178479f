# SPDX-License-Identifier: Apache-2.0
"""Datasets of one rank's corrupted and clean rows, over Megatron's own GPT datasets.

Shapes: S local rows of a rank, B micro-batch.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.utils import Split
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training.datasets.data_samplers import RandomSeedDataset
from megatron.training.utils import get_blend_and_blend_per_split
from torch.utils.data._utils.collate import default_collate_fn_map

from megatron_csbp import megatron_compat
from megatron_csbp.data.active_blocks import active_blocks
from megatron_csbp.data.dual_end_sampler import DualEndSampler
from megatron_csbp.data.packed_dataset import PackedDataset, PackedDatasetConfig
from megatron_csbp.data.packed_sampler import PackedSampler
from megatron_csbp.objectives.interface import Objective
from megatron_csbp.objectives.noise import SampleNoise
from megatron_csbp.transformer.geometry.layer_plans import LayerPlans, PlanKey, layer_plans
from megatron_csbp.transformer.geometry.sample import Sample

EVALUATION_SEED = 1234
"""Seed of validation and test noise in every run, so that evaluation losses compare across `--seed` too."""

SampleOf = Callable[[int], Sample]
"""The geometry of a sample by its index in the dataset; called in data workers, the same on every rank."""

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
    indices) tells it the epoch; but no global RNG is seeded or read: the epoch is in the noise's key. In evaluation
    the seed is fixed and the epoch is 0.

    An item holds `tokens`, `position_ids`, `labels` (targets), int64 [S]; `loss_weights`, float32 [S]; `num_tokens`
    and `num_supervised`, int64 scalars. The loader stacks them to [B, S] and [B]. Where samples have geometries of
    their own, `plans` are those of the sample, made here, in the data worker.

    Args:
        dataset: Megatron's GPTDataset, MockGPTDataset or BlendedDataset of them.
        plans: rows and plans of this rank for a sample without a geometry of its own.
        objective: the training objective.
        seed: seed of the training noise.
        padded_vocab_size: token ids must be below this.
        sample_of: the geometry of a sample by its index; None where all have that of `plans`, and for packed
            documents, which have their own.
        plan_keys: masks to plan for, where samples have geometries of their own.
        all_blocks: whether blocks of packed documents have corrupted rows even if none of them carries loss.
    """

    def __init__(
        self,
        dataset: Any,
        plans: LayerPlans,
        objective: Objective,
        *,
        seed: int,
        padded_vocab_size: int,
        sample_of: SampleOf | None = None,
        plan_keys: Sequence[PlanKey] = (),
        all_blocks: bool = False,
    ) -> None:
        super().__init__(dataset, seed)
        self.sampler: DualEndSampler | PackedSampler
        if is_packed(dataset):
            self.sampler = PackedSampler(dataset, padded_vocab_size)
        else:
            self.sampler = DualEndSampler(dataset, plans.rows.sample.length, padded_vocab_size)
        self._all_blocks = all_blocks
        self.objective = objective
        # The stock loader reads `split` to choose evaluation's batch sizes.
        self.split: Split = dataset.split if hasattr(dataset, "split") else dataset.index_split
        self._static_plans = plans
        self._sample_of = sample_of
        self._plan_keys = plan_keys
        # In shared memory, since persistent workers keep the copy of the dataset that they started with.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def set_epoch(self, epoch: int) -> None:
        """Take the epoch from Megatron's cyclic sampler."""
        super().set_epoch(epoch)
        self._epoch.fill_(epoch)

    def noises(self, sample_index: int) -> list[SampleNoise]:
        """Return the noise of each view of a sample in the present epoch."""
        seed, epoch = EVALUATION_SEED, 0
        if self.split is Split.train:
            seed, epoch = self.base_seed, int(self._epoch)
        views = self._static_plans.rows.sample.views
        return [SampleNoise(seed, self.split.value, sample_index, epoch, view) for view in views]

    def plans(self, sample_index: int) -> LayerPlans:
        """Return rows and plans of a sample."""
        static = self._static_plans.rows
        if isinstance(self.sampler, PackedSampler):
            sample = self._packed_sample(self.sampler, sample_index)
        elif self._sample_of is not None:
            sample = self._sample_of(sample_index)
        else:
            return self._static_plans
        if (sample.length, sample.block_size, sample.num_views) != (
            static.sample.length,
            static.sample.block_size,
            static.sample.num_views,
        ):
            raise ValueError(
                f"sample {sample_index} has {sample.length} positions, blocks of {sample.block_size} and "
                f"{sample.num_views} views; --seq-length, --diffusion-block-size and --corrupted-views say "
                f"{static.sample.length}, {static.sample.block_size} and {static.sample.num_views}."
            )
        return layer_plans(sample, static.sharding, static.rank).prepare(self._plan_keys)

    def _packed_sample(self, sampler: PackedSampler, sample_index: int) -> Sample:
        static = self._static_plans.rows.sample
        sample = replace(static, documents=sampler.documents(sample_index))
        if self._all_blocks:
            return sample
        supervised, noises = sampler.supervised(sample_index), self.noises(sample_index)
        return replace(sample, active=active_blocks(self.objective, sample, supervised, noises))

    @property
    def has_own_plans(self) -> bool:
        """Whether each sample has plans of its own."""
        return self._sample_of is not None or isinstance(self.sampler, PackedSampler)

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        """Return one sample's rows; for None, as in Megatron's datasets, rows without loss that fill a batch."""
        if idx is None:
            return without_loss(self[0])
        idx = int(idx)
        plans = self.plans(idx)
        rows = self.objective.place(self.sampler.read(idx, plans.rows), self.noises(idx), plans.rows)
        item = {
            "tokens": torch.from_numpy(rows.tokens),
            "position_ids": torch.from_numpy(plans.rows.positions),
            "labels": torch.from_numpy(rows.targets),
            "loss_weights": torch.from_numpy(rows.weights),
            "num_tokens": torch.tensor(rows.num_tokens),
            "num_supervised": torch.tensor(rows.num_supervised),
        }
        return item | {"plans": plans} if self.has_own_plans else item


def _only_plans(batch: list[LayerPlans], **unused: Any) -> LayerPlans:
    """Collate the plans of a micro-batch, which is one sample where samples have geometries of their own."""
    if len(batch) != 1:
        raise ValueError(
            f"--micro-batch-size {len(batch)}: samples with documents or few active blocks differ in their rows, so a "
            "micro-batch is one of them. Use --micro-batch-size 1."
        )
    return batch[0]


# torch's documented way to let the default collation take a type of one's own.
default_collate_fn_map[LayerPlans] = _only_plans


def without_loss(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item that counts for nothing: no row of it carries loss, and it adds 0 to every denominator."""
    return item | {key: torch.zeros_like(item[key]) for key in ("loss_weights", "num_tokens", "num_supervised")}


def is_packed(dataset: Any) -> bool:
    """Return whether a dataset, or each part of a blend, is of packed documents."""
    parts = dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]
    return all(isinstance(part, PackedDataset) for part in parts)


def build_train_valid_test_datasets(
    args: Any,
    num_samples: Sequence[int | None],
    plans: LayerPlans,
    objective: Objective,
    vp_stage: int | None = None,
    is_built: Callable[[], bool] | None = None,
    sample_of: SampleOf | None = None,
    plan_keys: Sequence[PlanKey] = (),
) -> tuple[Any, Any, Any]:
    """Build the three datasets over Megatron's own, on every rank together (Megatron's builder has barriers).

    Args:
        args: Megatron's arguments, with `clean_seq_length`, the user's `--seq-length`.
        num_samples: samples to draw for training, validation and test; None for one epoch.
        plans: rows and plans of this rank for a sample without a geometry of its own.
        objective: the training objective.
        vp_stage: virtual pipeline stage, or None.
        is_built: whether this rank reads data, True on global rank 0 at least. None: on the first and the last
            pipeline stage, and on all where samples have geometries of their own.
        sample_of: see `BlockDiffusionDataset`.
        plan_keys: see `BlockDiffusionDataset`.

    Returns:
        Training, validation and test datasets: a `BlockDiffusionDataset`, None where the split or the rank has
        none, or a list of them for `--multiple-validation-sets`.

    Raises:
        ValueError: a flag is set that samples cannot be built for.
    """
    config = dataset_config(args)
    dataset_class: Any = MockGPTDataset if args.mock_data else PackedDataset if args.pack_documents else GPTDataset
    on_every_stage = sample_of is not None or args.pack_documents
    is_built = is_built or partial(megatron_compat.rank_loads_data, vp_stage, on_every_stage=on_every_stage)
    splits = BlendedMegatronDatasetBuilder(dataset_class, list(num_samples), is_built, config).build()

    def wrap(dataset: Any) -> Any:
        if isinstance(dataset, list):
            return [wrap(part) for part in dataset]
        if dataset is None:
            return None
        return BlockDiffusionDataset(
            dataset,
            plans,
            objective,
            seed=args.seed,
            padded_vocab_size=args.padded_vocab_size,
            sample_of=sample_of,
            plan_keys=plan_keys,
            all_blocks=args.csbp_all_blocks,
        )

    train, valid, test = (wrap(dataset) for dataset in splits)
    return train, valid, test


def training_blend(args: Any) -> tuple[list[str], list[float] | None]:
    """Return the prefixes of the training datasets and their weights; None where Megatron takes their sizes."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    of_training = blend if blend is not None else blend_per_split[0] if blend_per_split else None
    return ([], None) if of_training is None else of_training


def dataset_config(args: Any) -> GPTDatasetConfig:
    """Return the stock dataset configuration for clean samples of L tokens."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences_per_dataset = None
    if args.per_dataset_sequences_path is not None:
        sequences_per_dataset = json.loads(Path(args.per_dataset_sequences_path).read_text(encoding="utf-8"))
    config_class: Any = GPTDatasetConfig
    packing = {}
    if args.pack_documents:
        config_class = PackedDatasetConfig
        packing = {name: getattr(args, name) for name in ("diffusion_block_size", "loss_on", "long_documents")}
    config: GPTDatasetConfig = config_class(
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
        **packing,
    )
    return config
