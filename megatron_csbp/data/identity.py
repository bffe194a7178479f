# SPDX-License-Identifier: Apache-2.0
"""What tells the data of two ranks apart where paths are equal and file systems are not: sizes and some bytes."""

import hashlib
from pathlib import Path
from typing import Any

from megatron.core.datasets.object_storage_utils import is_object_storage_path

from megatron_csbp.data.indexed_files import bin_path, idx_path
from megatron_csbp.data.validation import blends

_READ_BYTES = 1 << 16
_DIGEST_LETTERS = 12
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "tokenizer.model")


def data_identity(args: Any) -> dict[str, str]:
    """Return, for every dataset and for the tokenizer, sizes and a digest of the first and last 64 KiB of each file.

    Args:
        args: Megatron's validated arguments.

    Returns:
        Text by what it is of. Data in object storage are not read.
    """
    found: dict[str, str] = {}
    if not args.mock_data:
        blend, per_split = blends(args)
        for prefixes, _ in filter(None, [blend, *(per_split or ())]):
            for prefix in prefixes:
                if not is_object_storage_path(prefix):
                    found[f"the data {prefix}"] = _identity([idx_path(prefix), bin_path(prefix), Path(prefix)])
    tokenizer = Path(args.tokenizer_model or "")
    if args.tokenizer_model and tokenizer.exists():
        files = [tokenizer] if tokenizer.is_file() else [tokenizer / name for name in _TOKENIZER_FILES]
        found[f"the tokenizer {tokenizer}"] = _identity(files)
    return found


def _identity(files: list[Path]) -> str:
    """Return sizes and a digest of the files that are there; what a run needs of them is checked elsewhere."""
    digest, sizes = hashlib.sha256(), []
    for file in filter(Path.is_file, files):
        size = file.stat().st_size
        with file.open("rb") as stream:
            digest.update(stream.read(_READ_BYTES))
            stream.seek(max(0, size - _READ_BYTES))
            digest.update(stream.read(_READ_BYTES))
        sizes.append(f"{file.suffix or file.name} {size} bytes")
    return f"{', '.join(sizes) or 'no file'}, digest {digest.hexdigest()[:_DIGEST_LETTERS]}"
