# SPDX-License-Identifier: Apache-2.0
"""The demo's text: the longest sources of Python's standard library."""

import sysconfig
from pathlib import Path

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


def _is_utf8(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return True
