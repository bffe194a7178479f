# SPDX-License-Identifier: Apache-2.0
"""Refuses cached sample indices of other data than the files now hold.

Megatron finds a cached index by prefix and settings, not by what the files hold. Data that were prepared again under
the same prefix are then read through the index of the old ones: samples are cut in wrong places, and end in
padding. An index is of these files if it deals the documents of its split, and cuts samples every L tokens.
"""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.utils import Split

from megatron_csbp.data.indexed_files import IndexedFiles

_DESCRIPTION = "-description.txt"
_CHECKED_SAMPLES = 1 << 16
"""Sample boundaries that are compared, evenly spaced, the last among them."""


def check_index_cache(files: IndexedFiles, flag: str, args: Namespace) -> None:
    """Check every cached index of a dataset that a run with these flags could read.

    Args:
        files: the dataset.
        flag: the flag that names it, for messages.
        args: Megatron's validated arguments, with `clean_seq_length`.

    Raises:
        ValueError: an index is of other data, or cannot be read.
    """
    own = Path(files.prefix, "cache", "GPTDataset_indices")
    folder = own if args.data_cache_path is None else Path(args.data_cache_path)
    for path in sorted(folder.glob(f"*-GPTDataset-*{_DESCRIPTION}")):
        wanted = {"dataset_path": files.prefix, "random_seed": args.seed, "sequence_length": args.clean_seq_length}
        try:
            description = json.loads(path.read_text(encoding="utf-8"))
            if {key: description[key] for key in wanted} != wanted:
                continue
            reason = _why_stale(str(path).removesuffix(_DESCRIPTION), description, files)
        except (OSError, EOFError, ValueError, KeyError, TypeError, IndexError) as error:
            reason = f"cannot be read ({type(error).__name__}: {error}), unless another run is writing it right now"
        if reason is not None:
            raise ValueError(
                f"{flag} {files.prefix}: the cached sample index {path} {reason}. Remove the folder {folder}, from "
                "which all indices are then made anew, or give another --data-cache-path."
            )


def _why_stale(base: str, description: dict[str, Any], files: IndexedFiles) -> str | None:
    """Return why a cached index is not of these files; None where it is, or where Megatron would make it anew."""
    paths = [Path(f"{base}-{name}.npy") for name in ("document_index", "sample_index", "shuffle_index")]
    if not all(path.is_file() for path in paths):
        return None
    documents, boundaries, shuffle = (np.load(path, mmap_mode="r") for path in paths)
    first, last = _documents_of_split(description, files.num_documents)
    if (int(documents.min()), int(documents.max()) + 1) != (first, last):
        return (
            f"deals documents {documents.min()} to {documents.max()} of older data under this prefix, and the "
            f"{description['index_split']} split now has documents {first} to {last - 1}"
        )
    ends = np.cumsum(files.sequence_lengths[documents], dtype=np.int64)
    number = len(boundaries) - 1
    chosen = np.unique(np.linspace(0, number, min(number + 1, _CHECKED_SAMPLES)).astype(np.int64))
    document, offset = boundaries[chosen].astype(np.int64).T
    found = ends[document] - files.sequence_lengths[documents[document]] + offset
    expected = np.minimum(chosen * description["sequence_length"], ends[-1] - 1)
    if len(shuffle) != number or not np.array_equal(found, expected):
        return "cuts samples of older data, whose documents had other lengths, under this prefix"
    return None


def _documents_of_split(description: dict[str, Any], num_documents: int) -> tuple[int, int]:
    """Return the documents [first, last) of an index's split, rounded as Megatron does."""
    matrix = description["split_matrix"]
    share = (0.0, 1.0) if matrix is None else matrix[Split[description["index_split"]].value]
    first, last = (round(bound * float(num_documents)) for bound in share)
    return first, last
