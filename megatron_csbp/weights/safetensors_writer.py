# SPDX-License-Identifier: Apache-2.0
"""Writes safetensors files tensor by tensor, in any order.

The library's own writer takes all tensors of a file at once. The format is a length, a JSON header with the place of
every tensor, and their bytes; shapes and dtypes are known before the first tensor is.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

import torch
from torch import Tensor

from megatron_csbp.weights.safetensors_reader import DTYPES, INDEX, SINGLE

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8
LARGEST_FILE_BYTES = 5 * 10**9
"""Files are no larger than this, unless one tensor is."""


@dataclass(frozen=True)
class _Place:
    """Where in which file the bytes of a tensor go."""

    file: str
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class SafetensorsWriter:
    """Writes a set of tensors, known by name, shape and dtype, into the files of a Hugging Face folder.

    Use it as a context manager; leaving it without an error checks that every tensor was written.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        files: Mapping[str, str] | None = None,
    ) -> None:
        """Plan the files.

        Args:
            folder: has to exist.
            tensors: shape and dtype by name.
            files: name of the file of each tensor; by default, files of `LARGEST_FILE_BYTES`.
        """
        self._folder = folder
        self._places: dict[str, _Place] = {}
        self._headers: dict[str, bytes] = {}
        self._open: dict[str, BinaryIO] = {}
        self._left_bytes = {name: _size(*tensors[name]) for name in tensors}
        if files is None or set(files) != set(tensors):
            files = _distribute(tensors)
        for file in sorted(set(files.values())):
            self._plan(file, {name: tensors[name] for name in tensors if files[name] == file})
        self._total_bytes = sum(_size(*tensors[name]) for name in tensors)

    def __enter__(self) -> Self:
        """Open the files and write their headers."""
        for file, header in self._headers.items():
            self._open[file] = (self._folder / file).open("wb")
            self._open[file].write(header)
        return self

    def write(self, name: str, tensor: Tensor, first_row: int | None = None) -> None:
        """Write a tensor to its place.

        Args:
            name: of the tensor.
            tensor: all of it, or some rows.
            first_row: of some rows, where they begin.
        """
        place = self._places[name]
        skipped = slice(0 if first_row is None else 1, None)
        planned = (place.shape[skipped], place.dtype)
        assert (tuple(tensor.shape)[skipped], tensor.dtype) == planned, f"{name} is not as it was planned"
        file = self._open[place.file]
        file.seek(place.start + (first_row or 0) * _size(place.shape[1:], place.dtype))
        file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        self._left_bytes[name] -= tensor.nbytes

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the files; write the index if there are several."""
        for file in self._open.values():
            file.close()
        if kind is not None:
            return
        left = sorted(name for name, size in self._left_bytes.items() if size)
        assert not left, f"never written: {left}"
        if set(self._headers) == {SINGLE}:
            return
        weights = {name: place.file for name, place in sorted(self._places.items())}
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weights}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _plan(self, file: str, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        """Lay out a file as the library does: by falling width of the dtype, then by name."""
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        ends: dict[str, int] = {}
        position = 0
        for name in sorted(tensors, key=lambda name: (-tensors[name][1].itemsize, name)):
            shape, dtype = tensors[name]
            ends[name] = position + _size(shape, dtype)
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [position, ends[name]]}
            position = ends[name]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._headers[file] = struct.pack("<Q", len(text)) + text
        for name, end in ends.items():
            shape, dtype = tensors[name]
            start = len(self._headers[file]) + end - _size(shape, dtype)
            self._places[name] = _Place(file, start, shape, dtype)


def _size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes of a tensor."""
    size = dtype.itemsize
    for length in shape:
        size *= length
    return size


def _distribute(tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, str]:
    """Say for each tensor into which file it goes."""
    number, filled = 0, 0
    numbers: dict[str, int] = {}
    for name, (shape, dtype) in tensors.items():
        size = _size(shape, dtype)
        if filled and filled + size > LARGEST_FILE_BYTES:
            number, filled = number + 1, 0
        numbers[name] = number
        filled += size
    if number == 0:
        return dict.fromkeys(tensors, SINGLE)
    return {name: f"model-{at + 1:05d}-of-{number + 1:05d}.safetensors" for name, at in numbers.items()}
