# SPDX-License-Identifier: Apache-2.0
"""Reads parts of the tensors in a Megatron `torch_dist` checkpoint, whatever topology wrote it."""

import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_csbp.weights.layouts import Shape


class _RegionPlanner(LoadPlanner):
    """Puts what the reader finds into one tensor."""

    def __init__(self, region: Tensor) -> None:
        self._region = region

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the part of the region that a stored piece fills."""
        part = self._region
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dim, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing is left to do: the part is a view."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Never called: only tensors are asked for."""
        raise AssertionError(read_item)

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        """Nothing to set up."""

    def create_local_plan(self) -> LoadPlan:
        """Never called: `TorchDistCheckpoint.read` makes the plan."""
        raise AssertionError

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Never called."""
        raise AssertionError

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Never called."""
        raise AssertionError


class TorchDistCheckpoint:
    """The tensors of one iteration's folder.

    Attributes:
        path: the folder.
        tensors: shape and dtype of every tensor by key, without those of the optimizer.
    """

    def __init__(self, path: Path) -> None:
        """Read what there is, not the tensors."""
        self.path = path
        self._reader = FileSystemReader(path)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self.tensors: dict[str, tuple[Shape, torch.dtype]] = {
            key: (tuple(entry.size), entry.properties.dtype)
            for key, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not key.startswith("optimizer.")
        }

    def read(self, key: str, offset: Shape, shape: Shape) -> Tensor:
        """Return a part of a tensor.

        Args:
            key: the tensor.
            offset: where the part begins, in every dim.
            shape: of the part.
        """
        entry = self._metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        region = torch.empty(shape, dtype=entry.properties.dtype)
        wanted = ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))
        items = create_read_items_for_chunk_list(key, entry, [wanted])
        assert sum(item.lengths.numel() for item in items) == region.numel(), f"{key} has holes"
        self._reader.read_data(LoadPlan(items), _RegionPlanner(region)).wait()
        return region
