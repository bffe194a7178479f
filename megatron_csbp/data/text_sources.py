# SPDX-License-Identifier: Apache-2.0
"""Finds and reads the records of text files, folders, JSON Lines and Parquet files, for preparation."""

import codecs
import json
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_csbp.data.parquet import SUFFIXES as PARQUET_SUFFIXES
from megatron_csbp.data.parquet import read_rows
from megatron_csbp.data.records import KINDS, Document, Faults, Located, Record, RecordError, record_from

JSON_LINES_SUFFIXES = (".jsonl", ".ndjson")
FORMATS = ("auto", "text", "jsonl", "parquet")
_SUFFIXES_NAMED = 5


@dataclass(frozen=True)
class Reading:
    """How files become records.

    Attributes:
        json_key: key of a document's text in a JSON object or a table.
        format: `text`: each file is one document; `jsonl`: each line is a record; `parquet`: each row is one; `auto`:
            by name and first line.
        kind: what a record is; `auto`: by its keys.
    """

    json_key: str = "text"
    format: str = "auto"
    kind: str = "auto"


def add_reading_arguments(parser: ArgumentParser) -> None:
    """Add the flags that say what is read, and how."""
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="text, JSON Lines and Parquet files, and folders")
    add("--glob", nargs="+", default=["*"], metavar="PATTERN", help="names of the files to take from folders")
    add("--format", choices=FORMATS, default="auto", help="what the files are (default: by name and first line)")
    add(
        "--kind",
        choices=KINDS,
        default="auto",
        help="what a line or row is: a document (text), prompt and completion "
        "(pairs), or messages (chats; default: by its keys)",
    )
    add("--json-key", default="text", metavar="KEY", help="key of a document's text in a line or row (default: text)")
    add(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="stop at a file, line or row that cannot be used, or leave it out and say how many were (default: stop)",
    )


def reading_from_args(args: Namespace) -> Reading:
    """Return how files become records, by the flags of `add_reading_arguments`."""
    return Reading(args.json_key, args.format, args.kind)


def find_files(inputs: Sequence[str], patterns: Sequence[str]) -> list[Path]:
    """Return the files that the inputs name: files as they are, folders searched recursively, in sorted order.

    Args:
        inputs: files and folders.
        patterns: shell patterns for the names of files in folders; hidden files and folders are left out.

    Raises:
        ValueError: an input does not exist, or no file was found.
    """
    found: list[Path] = []
    for name in inputs:
        path = Path(name)
        if path.is_file():
            found.append(path)
        elif path.is_dir():
            found += _files_of(path, patterns)
        else:
            raise ValueError(f"--input {name} does not exist. Give text files, JSON Lines files or folders.")
    if not found:
        raise ValueError(
            f"--input {' '.join(inputs)} holds no file that matches --glob {' '.join(patterns)}. "
            f"{_what_there_is(inputs)}"
        )
    return list(dict.fromkeys(found))


def _files_of(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Return a folder's files that match a pattern and are not hidden, sorted."""
    matches = {match for pattern in patterns for match in folder.rglob(pattern) if match.is_file()}
    return sorted(m for m in matches if not any(part.startswith(".") for part in m.relative_to(folder).parts))


def _what_there_is(inputs: Sequence[str]) -> str:
    """Say which files the folders do hold, and a pattern that takes the most frequent kind."""
    endings = Counter(path.suffix or path.name for name in inputs for path in _files_of(Path(name), ["*"]))
    if not endings:
        return "There is no file in it, hidden ones apart. Give another folder, or files."
    kinds = ", ".join(f"{count} *{ending}" for ending, count in endings.most_common(_SUFFIXES_NAMED))
    return f"It has {kinds}: for example --glob '*{endings.most_common(1)[0][0]}'."


def read_records(path: Path, reading: Reading, faults: Faults) -> Iterator[Located]:
    """Yield a file's records. A byte-order mark at its start is no text.

    Args:
        path: the file.
        reading: how to read it.
        faults: takes records that cannot be used.

    Yields:
        Records whose texts UTF-8 can encode; one line or a few rows in memory at a time, a text file whole.

    Raises:
        ValueError: the file cannot be read or is of an unclear format, or a record cannot be used and is not left
            out.
    """
    try:
        kind = _format_of(path, reading)
        if kind == "text":
            yield from _located(str(path), lambda: Document(_decoded(path.read_bytes())), faults)
        elif kind == "parquet":
            for number, row in enumerate(read_rows(path), start=1):
                make = partial(record_from, row, reading.kind, reading.json_key)
                yield from _located(f"{path}, row {number}", make, faults)
        else:
            with path.open("rb") as stream:
                for number, line in enumerate(stream, start=1):
                    yield from _located(f"{path}, line {number}", partial(_record_of_line, line, reading), faults)
    except OSError as error:
        raise ValueError(f"--input file {path} cannot be read: {error.strerror or error}.") from error


def _located(place: str, make: Callable[[], Record | None], faults: Faults) -> Iterator[Located]:
    """Yield the record that is made, if there is one and it can be used."""
    try:
        record = make()
    except RecordError as error:
        faults.add(place, str(error))
        return
    if record is not None:
        yield Located(place, record)


def _format_of(path: Path, reading: Reading) -> str:
    """Return how a file is read: by the flag, its name and its first line."""
    if reading.format != "auto":
        return reading.format
    if path.suffix.lower() in PARQUET_SUFFIXES:
        return "parquet"
    return "jsonl" if _is_json_lines(path, reading) else "text"


def _is_json_lines(path: Path, reading: Reading) -> bool:
    """Whether each line of a file is a document.

    Raises:
        ValueError: the name says one thing and the first line another.
    """
    suffix = path.suffix.lower()
    if suffix in JSON_LINES_SUFFIXES:
        return True
    record = _first_record(path)
    if suffix == ".json":
        if record is None and path.stat().st_size:
            raise ValueError(
                f"--input file {path} is JSON, but not one object a line. Write it as JSON Lines, leave it out with "
                "--glob, or take each file as it stands, syntax and all, with --format text."
            )
        return record is not None
    known = [key for key in (reading.json_key, "messages", "prompt") if record is not None and key in record]
    if known:
        raise ValueError(
            f"--input file {path} begins with a JSON object that has the key {known[0]}, but is not named "
            ".jsonl. Say what it is: --format jsonl, a document a line, or --format text, one document with the "
            "syntax in it."
        )
    return False


def _first_record(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file's first line, or None where there is none."""
    with path.open("rb") as stream:
        if not stream.read(len(codecs.BOM_UTF8) + 1).removeprefix(codecs.BOM_UTF8).startswith(b"{"):
            return None
        stream.seek(0)
        line = stream.readline()
    try:
        record = json.loads(line.removeprefix(codecs.BOM_UTF8))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _decoded(data: bytes) -> str:
    """Return bytes as text."""
    try:
        return data.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        raise RecordError(
            f"is not UTF-8 text (byte {error.start}). Convert it, or choose files with --glob."
        ) from error


def _record_of_line(line: bytes, reading: Reading) -> Record | None:
    """Return the record of one JSON line; None where it is empty."""
    decoded = _decoded(line)
    if not decoded.strip():
        return None
    try:
        fields = json.loads(decoded)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", None) or str(error)
        raise RecordError(f"is not JSON ({reason}). Each line must be one JSON object.") from error
    return record_from(fields, reading.kind, reading.json_key)
