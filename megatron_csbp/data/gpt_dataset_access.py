# SPDX-License-Identifier: Apache-2.0
"""What the sampler has to know about the inside of Megatron's datasets. Wraps attributes, computes nothing."""

from typing import Any

import numpy as np
import numpy.typing as npt
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.safe_globals import safe_numpy_load

IndexArray = npt.NDArray[np.int64]


def reads_stock_samples(dataset: Any) -> bool:
    """Return whether a dataset is a GPTDataset (or mock) that cuts its samples as GPTDataset itself does."""
    cls = type(dataset)
    return isinstance(dataset, GPTDataset) and (
        cls.__getitem__ is GPTDataset.__getitem__
        and cls._query_document_sample_shuffle_indices is GPTDataset._query_document_sample_shuffle_indices
    )


def gpt_dataset_indices(dataset: Any) -> tuple[IndexArray, IndexArray, IndexArray]:
    """Return a GPTDataset's document index [d], sample index [n + 1, 2] and shuffle index [n].

    They are loaded here if `--dataloader-defer-npy-index-mmap` has left that to the first access.
    """
    if dataset.shuffle_index is None:
        for name in ("sample_index", "document_index", "shuffle_index"):
            path = getattr(dataset, f"path_to_{name}")
            setattr(dataset, name, safe_numpy_load(path, allow_pickle=True, mmap_mode="r"))
    return dataset.document_index, dataset.sample_index, dataset.shuffle_index


def blend_indices(dataset: Any) -> tuple[npt.NDArray[np.int16], IndexArray]:
    """Return a BlendedDataset's dataset index [n] and dataset sample index [n], loaded here if that was deferred."""
    if dataset.dataset_index is None:
        for name in ("dataset_index", "dataset_sample_index"):
            path = getattr(dataset, f"path_to_{name}")
            setattr(dataset, name, safe_numpy_load(path, allow_pickle=True, mmap_mode="r"))
    return dataset.dataset_index, dataset.dataset_sample_index
