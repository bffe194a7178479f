# SPDX-License-Identifier: Apache-2.0
"""The demo's text: the longest sources of Python's standard library."""

import sysconfig
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

MASK_ID = 1
"""The id of the mask in the tokenizer that is trained here: special tokens come first."""

_FOLDER = Path(sysconfig.get_path("stdlib"))

LONGEST_BYTES = 200_000
"""Longer files of the standard library are tables, not programs."""


def standard_library_documents(total_bytes: int) -> list[Path]:
    """Return the longest sources of this Python's standard library, in the order of their paths.

    Args:
        total_bytes: stop once the files are this long together.

    Raises:
        ValueError: this Python has fewer sources than that.
    """
    chosen: list[Path] = []
    chosen_bytes = 0
    for path, size in _longest_first(LONGEST_BYTES):
        if chosen_bytes >= total_bytes:
            return sorted(chosen)
        chosen.append(path)
        chosen_bytes += size
    raise ValueError(
        f"the standard library in {_FOLDER} has only {chosen_bytes} bytes of Python sources; the demo needs "
        f"{total_bytes}. Use a full installation of Python (Debian: python3-full)."
    )


def held_out_document(most_bytes: int, documents: Collection[Path]) -> Path:
    """Return the longest source of at most so many bytes that is none of the documents to train on.

    Raises:
        ValueError: there is none.
    """
    for path, _ in _longest_first(most_bytes):
        if path not in documents:
            return path
    raise ValueError(f"the standard library in {_FOLDER} has no source of at most {most_bytes} bytes to hold out.")


def entropy_of_tokens(prefix: Path) -> float:
    """Return the entropy of the single tokens of an indexed dataset, in nats: the best loss without any context.

    Args:
        prefix: of the dataset's files.
    """
    counts = np.bincount(np.fromfile(prefix.with_suffix(".bin"), dtype=np.uint16))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _longest_first(most_bytes: int) -> Iterator[tuple[Path, int]]:
    """Yield the readable sources of the standard library up to a size, and their bytes."""
    sizes = {
        path: path.stat().st_size
        for path in _FOLDER.rglob("*.py")
        if not {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"} & set(path.parts)
    }
    for path, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        if size <= most_bytes and _is_utf8(path):
            yield path, size


def _is_utf8(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return True
