# SPDX-License-Identifier: Apache-2.0
"""Reads the tensors of a Hugging Face folder one at a time."""

import ctypes
import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# The names of the format, and PyTorch's.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor is and what it looks like."""

    file: Path
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class SafetensorsFolder:
    """The tensors of a folder with `model.safetensors`, or with an index and several files.

    Attributes:
        folder: the folder.
        entries: every tensor by name.
    """

    def __init__(self, folder: Path) -> None:
        """List the tensors; reads headers only.

        Raises:
            ValueError: there are no safetensors files, one is damaged or missing, or a tensor is of a dtype that
                training does not use (a quantized model).
        """
        self.folder = folder
        self.entries: dict[str, TensorEntry] = {}
        for file in self._files():
            try:
                self.entries |= dict(_entries(file))
            except (OSError, SafetensorError, struct.error, json.JSONDecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"{file} cannot be read as safetensors: {error}. Fetch it again.") from error

    def read(self, name: str, first_row: int = 0, rows: int | None = None) -> Tensor:
        """Return a tensor, or some of its rows, in memory of its own.

        The library would map the file, and then pages of it count as this process's memory for as long as it likes.

        Args:
            name: the tensor.
            first_row: where to begin.
            rows: how many; all by default.
        """
        entry = self.entries[name]
        shape = entry.shape if rows is None else (rows, *entry.shape[1:])
        tensor = torch.empty(shape, dtype=entry.dtype)
        row_bytes = math.prod(entry.shape[1:]) * entry.dtype.itemsize
        with entry.file.open("rb", buffering=0) as file:
            file.seek(entry.start + first_row * row_bytes)
            # Not through NumPy, which would forbid to give the memory back before the tensor.
            view = memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
            while len(view):
                count = file.readinto(view)
                if not count:
                    raise ValueError(f"{entry.file} ends within {name}; fetch it again.")
                view = view[count:]
        return tensor

    def _files(self) -> list[Path]:
        index = self.folder / INDEX
        if index.is_file():
            files = sorted({self.folder / name for name in json.loads(index.read_text())["weight_map"].values()})
        else:
            files = [self.folder / SINGLE]
        missing = [file.name for file in files if not file.is_file()]
        if not missing:
            return files
        pickled = sorted(
            path.name for path in self.folder.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".ckpt")
        )
        hint = (
            f" It has {', '.join(pickled[:3])}: pickled weights are not read, since a pickle can run code; save the "
            "model again with safe_serialization."
            if pickled
            else ""
        )
        raise ValueError(f"{self.folder} has no {', '.join(missing[:3])}.{hint}")


def _entries(file: Path) -> Iterator[tuple[str, TensorEntry]]:
    with file.open("rb") as raw:
        (length,) = struct.unpack("<Q", raw.read(8))
        header = json.loads(raw.read(length)) if length <= file.stat().st_size else {}
    with safe_open(file, framework="pt", device="cpu") as opened:  # refuses what is no sound file
        for name in opened.keys():  # noqa: SIM118  # not a dictionary
            part = opened.get_slice(name)
            if part.get_dtype() not in DTYPES:
                raise ValueError(
                    f"{file.name}: {name} is of dtype {part.get_dtype()}; only {', '.join(DTYPES)} can be imported. "
                    "Take a "
                    "checkpoint that is not quantized."
                )
            start = 8 + length + header[name]["data_offsets"][0]
            yield name, TensorEntry(file, start, tuple(part.get_shape()), DTYPES[part.get_dtype()])
