# SPDX-License-Identifier: Apache-2.0
"""What a command has found, for who reads it: lines on standard output, and a JSON file."""

import json
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def print_results(lines: Iterable[str]) -> None:
    """Print lines; where their reader has gone, as `head` does, end without a traceback, as other commands do.

    Raises:
        SystemExit: the reader has gone; with the status that a shell shows for SIGPIPE.
    """
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError as error:
        # What is still in the buffer would fail again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from error


def check_json_file(path: Path) -> None:
    """Check, before the work, that `--json` names a file that can be written.

    Raises:
        ValueError: it does not.
    """
    folder = path.resolve().parent
    if path.is_dir() or not folder.is_dir():
        raise ValueError(f"--json {path} is a folder, or in one that does not exist; name a file.")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"--json {path} cannot be written: no permission; name another file.")


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write what `--json` asks for.

    Raises:
        ValueError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="ascii")
    except OSError as error:
        raise ValueError(f"--json {path} cannot be written: {error.strerror or error}; name another file.") from error
