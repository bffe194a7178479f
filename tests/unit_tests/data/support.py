# SPDX-License-Identifier: Apache-2.0
"""Small indexed datasets, and Megatron's own datasets over them."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

VOCAB, EOD, PAD = 200, 199, 198


@dataclass
class Tokenizer:
    """What GPTDataset asks of a tokenizer."""

    vocab_size: int = VOCAB
    eod: int | None = EOD
    pad: int | None = PAD

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        return OrderedDict(vars(self))


def documents(count: int, longest: int, seed: int = 0) -> list[np.ndarray]:
    """Documents of random tokens, each ended by EOD."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, count)
    return [np.append(rng.integers(0, 150, length - 1), EOD) for length in lengths]


def write_indexed(prefix: Path, docs: Sequence[np.ndarray], dtype: type[np.number] = np.uint16) -> str:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for doc in docs:
        builder.add_document(doc, [len(doc)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def config(length: int, prefixes: list[str], weights: list[float] | None = None, **options: Any) -> GPTDatasetConfig:
    defaults = {
        "random_seed": 1234,
        "sequence_length": length,
        "blend": (prefixes, weights),
        "split": "8,1,1",
        "tokenizer": Tokenizer(),
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask": False,
    }
    return GPTDatasetConfig(**{**defaults, **options})


def stock_datasets(sizes: Sequence[int | None], cfg: GPTDatasetConfig) -> list[Any]:
    return BlendedMegatronDatasetBuilder(GPTDataset, list(sizes), lambda: True, cfg).build()


def megatron_args(**changes: Any) -> SimpleNamespace:
    """The arguments that the data code reads, at Megatron's defaults but for a NullTokenizer of 64 tokens."""
    values: dict[str, Any] = {
        "seed": 1234,
        "clean_seq_length": 32,
        "padded_vocab_size": 64,
        "mock_data": False,
        "mask_token_id": 1000,
        "skip_train": False,
        "eval_iters": 0,
        "split": "8,1,1",
        "tokenizer_type": "NullTokenizer",
        "vocab_size": 64,
        "pad_vocab_size": False,
        "mmap_bin_files": True,
        "mid_level_dataset_surplus": 0.005,
        "num_dataset_builder_threads": 1,
        "dataloader_type": "single",
        "micro_batch_size": 2,
        "global_batch_size": 4,
        "num_workers": 0,
        "loss_on": "answers",
        "long_documents": "refuse",
    }
    off = (
        "sft fim_data reset_position_ids reset_attention_mask dataloader_inter_document_masking "
        "hybrid_context_parallel pack_documents csbp_all_blocks eod_mask_loss multiple_validation_sets "
        "full_validation "
        "dataloader_fast_cache_load dataloader_defer_npy_index_mmap data_sharding exit_signal_handler"
    )
    absent = (
        "data_path data_args_path train_data_path valid_data_path test_data_path per_split_data_args_path "
        "data_cache_path object_storage_cache_path per_dataset_sequences_path"
    )
    defaults = dict.fromkeys(off.split(), False) | dict.fromkeys(absent.split()) | values
    return SimpleNamespace(**(defaults | changes))
