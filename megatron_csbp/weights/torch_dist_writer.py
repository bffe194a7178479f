# SPDX-License-Identifier: Apache-2.0
"""Writes a Megatron `torch_dist` checkpoint piece by piece, with PyTorch's own writer and without process groups."""

import io
import json
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_csbp.weights.released_memory import released_memory
from megatron_csbp.weights.rules import Piece

TRACKER = "latest_checkpointed_iteration.txt"
FIRST_ITERATION = "iter_0000000"
COMMON_STATE = "common_state/shard_0_1"


class _PiecewisePlanner(DefaultSavePlanner):
    """Hands PyTorch's writer one piece at a time, made at the moment when it is written."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        make: Callable[[Piece], Tensor],
        dtypes: Mapping[str, torch.dtype],
        objects: Mapping[str, Any],
        done: Callable[[int], None],
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._make = make
        self._dtypes = dtypes
        self._objects = objects
        self._done = done
        self._pieces = {(key, torch.Size(piece.offset)): piece for piece in pieces for key in piece.keys}
        self._made: tuple[Piece, Tensor] | None = None

    def create_local_plan(self) -> SavePlan:
        """List what is to be written."""
        items = [
            WriteItem(
                index=MetadataIndex(key, offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offset, torch.Size(piece.shape)),
                    properties=TensorProperties(dtype=self._dtypes[key]),
                    size=torch.Size(piece.global_shape),
                ),
            )
            for (key, offset), piece in self._pieces.items()
        ]
        items += [WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO) for key in self._objects]
        self.plan = SavePlan(items=items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Return what is to be written now."""
        index = write_item.index
        if index.offset is None:
            buffer = io.BytesIO()
            torch.save([self._objects[index.fqn]], buffer)
            return buffer
        piece = self._pieces[index.fqn, index.offset]
        if self._made is None or self._made[0] is not piece:
            if self._made is not None:
                size_bytes = self._made[1].nbytes
                self._made = None  # before the next one is made
                self._done(size_bytes)
            self._made = (piece, self._make(piece).to(self._dtypes[index.fqn]))
        return self._made[1].reshape(piece.shape)


def write_checkpoint(
    folder: Path,
    pieces: Sequence[Piece],
    make: Callable[[Piece], Tensor],
    dtypes: Mapping[str, torch.dtype],
    state_keys: Sequence[str],
    arguments: Namespace,
) -> None:
    """Write a checkpoint of iteration 0, without optimizer and random states.

    Args:
        folder: where `latest_checkpointed_iteration.txt` goes.
        pieces: what it holds.
        make: makes a piece's tensor; called once for each, and nothing made is kept.
        dtypes: by key.
        state_keys: keys of the extra states; all are empty.
        arguments: what the checkpoint says of the run that made it.
    """
    path = folder / FIRST_ITERATION
    path.mkdir(parents=True)
    common = {
        "args": arguments,
        "checkpoint_version": 3.0,
        "iteration": 0,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
    }
    objects = {key: torch.empty(0, dtype=torch.uint8) for key in state_keys} | {COMMON_STATE: common}
    with released_memory() as done, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is how it is meant
        planner = _PiecewisePlanner(pieces, make, dtypes, objects, done)
        save({}, storage_writer=FileSystemWriter(path), planner=planner, no_dist=True)
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    (folder / TRACKER).write_text("0")
