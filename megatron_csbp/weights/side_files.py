# SPDX-License-Identifier: Apache-2.0
"""What goes along with the weights: config.json, the tokenizer, the model's own code."""

import json
import shutil
from pathlib import Path
from typing import Any

HUGGING_FACE = "huggingface"
"""Folder in an imported checkpoint that keeps the files of the model it came from."""

_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".pkl", ".npz"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


def read_config(folder: Path, flag: str) -> dict[str, Any]:
    """Return the contents of a folder's config.json.

    Raises:
        ValueError: there is none, or it is not JSON.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{flag} {folder} is not the folder of a Hugging Face model: it has no config.json. Give a local "
            "folder, for "
            f"example {flag} /models/Qwen3-0.6B."
        )
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} has to hold a JSON object.")
    return config


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Write a folder's config.json."""
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def copy_side_files(source: Path, target: Path) -> None:
    """Copy the files of a model but its weights; folders are left out."""
    target.mkdir(exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix not in _WEIGHTS:
            shutil.copyfile(path, target / path.name)


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has the files of a tokenizer."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)
