# SPDX-License-Identifier: Apache-2.0
"""The demo's text: the longest sources of Python's standard library."""

import sysconfig
from pathlib import Path

import numpy as np

MASK_ID = 1
"""The id of the mask in the tokenizer that is trained here: special tokens come first."""

LONGEST_BYTES = 200_000
"""Longer files of the standard library are tables, not programs."""


def standard_library_documents(total_bytes: int) -> list[Path]:
    """Return the longest sources of this Python's standard library, in the order of their paths.

    Args:
        total_bytes: stop once the files are this long together.

    Raises:
        ValueError: this Python has fewer sources than that.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    sizes = {
        path: path.stat().st_size
        for path in folder.rglob("*.py")
        if not {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"} & set(path.parts)
    }
    chosen: list[Path] = []
    for path, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        if sum(sizes[document] for document in chosen) >= total_bytes:
            return sorted(chosen)
        if size <= LONGEST_BYTES and _is_utf8(path):
            chosen.append(path)
    raise ValueError(
        f"the standard library in {folder} has only {sum(sizes.values())} bytes of Python sources; the demo needs "
        f"{total_bytes}. Use a full installation of Python (Debian: python3-full)."
    )


def entropy_of_tokens(prefix: Path) -> float:
    """Return the entropy of the single tokens of an indexed dataset, in nats: the best loss without any context.

    Args:
        prefix: of the dataset's files.
    """
    counts = np.bincount(np.fromfile(prefix.with_suffix(".bin"), dtype=np.uint16))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _is_utf8(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return True
