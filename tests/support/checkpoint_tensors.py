# SPDX-License-Identifier: Apache-2.0
"""Whole tensors of a Megatron `torch_dist` checkpoint, under names that no topology changes."""

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

Tensors = dict[str, Tensor]


def load_tensors(folder: Path, iteration: int) -> Tensors:
    """Load every tensor of a checkpoint.

    Args:
        folder: what `--save` named.
        iteration: which checkpoint in it.
    """
    reader = FileSystemReader(str(folder / f"iter_{iteration:07d}"))
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def load_parameters(folder: Path, iteration: int) -> Tensors:
    """Load the parameters of the model, without optimizer state."""
    tensors = load_tensors(folder, iteration)
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("optimizer.")}


def relative_errors(found: Tensors, expected: Tensors) -> dict[str, float]:
    """Return the norm of the difference over the norm of what is expected, for each tensor."""
    assert found.keys() == expected.keys()
    return {
        name: ((found[name] - tensor).double().norm() / tensor.double().norm()).item()
        for name, tensor in expected.items()
    }
