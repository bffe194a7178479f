# SPDX-License-Identifier: Apache-2.0
"""Folders that appear under their name only when they are complete."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_folder(target: Path, flag: str) -> Iterator[Path]:
    """Yield a temporary folder beside the target, and give it the target's name if the block succeeds.

    Args:
        target: must not exist, or be empty.
        flag: names it, for the message.

    Raises:
        ValueError: it holds something, or cannot be written.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(
            f"{flag} {target} exists and is not empty; nothing is overwritten. Name another folder, for example "
            f"{flag} {target}-2, or remove it."
        )
    temporary = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if target.exists():
            target.rmdir()
        temporary.rename(target)
    except OSError as error:
        raise ValueError(f"{flag} {target} cannot be written: {error}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
