# SPDX-License-Identifier: Apache-2.0
"""Finds and reads the documents of text files, folders and JSON Lines files, for preparation."""

import codecs
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JSON_LINES_SUFFIXES = (".jsonl", ".ndjson")
FORMATS = ("auto", "text", "jsonl")
_SUFFIXES_NAMED = 5


@dataclass(frozen=True)
class Reading:
    """How files become documents.

    Attributes:
        json_key: key of the text in each JSON object.
        skip_undecodable: leave out documents that are not UTF-8 text, instead of an error.
        format: `text`: each file is one document; `jsonl`: each line is one; `auto`: by name and first line.
    """

    json_key: str = "text"
    skip_undecodable: bool = False
    format: str = "auto"


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


def read_documents(path: Path, reading: Reading) -> Iterator[str]:
    """Yield the texts of a file's documents. A byte-order mark at its start is no text.

    Args:
        path: the file.
        reading: how to read it.

    Yields:
        Texts that UTF-8 can encode; one line of a JSON Lines file read at a time.

    Raises:
        ValueError: the file cannot be read or is of an unclear format, a document is not UTF-8, or a line is not a
            JSON object with text under the key.
    """
    try:
        if _is_json_lines(path, reading):
            with path.open("rb") as stream:
                for number, line in enumerate(stream, start=1):
                    text = _text_of(line, f"{path}, line {number},", reading)
                    if text is not None:
                        yield text
        else:
            text = _decoded(path.read_bytes(), str(path), reading)
            if text is not None:
                yield text
    except OSError as error:
        raise ValueError(f"--input file {path} cannot be read: {error.strerror or error}.") from error


def _is_json_lines(path: Path, reading: Reading) -> bool:
    """Whether each line of a file is a document.

    Raises:
        ValueError: the name says one thing and the first line another.
    """
    suffix = path.suffix.lower()
    if reading.format != "auto":
        return reading.format == "jsonl"
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
    if record is not None and reading.json_key in record:
        raise ValueError(
            f"--input file {path} begins with a JSON object that has the key {reading.json_key}, but is not named "
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


def _decoded(data: bytes, place: str, reading: Reading) -> str | None:
    """Return bytes as text, or None where they are none and may be left out."""
    try:
        return data.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        if reading.skip_undecodable:
            return None
        raise ValueError(
            f"--input file {place} is not UTF-8 text (byte {error.start}). Convert it, choose files with --glob, or "
            "leave out what is not UTF-8 with --skip-undecodable."
        ) from error


def _text_of(line: bytes, place: str, reading: Reading) -> str | None:
    """Return the text of one JSON line; None where it is empty, or is no text and may be left out."""
    decoded = _decoded(line, place, reading)
    if decoded is None or not decoded.strip():
        return None
    try:
        record = json.loads(decoded)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", None) or str(error)
        raise ValueError(f"--input file {place} is not JSON ({reason}). Each line must be one JSON object.") from error
    key = reading.json_key
    if isinstance(record, dict) and key in record and not isinstance(record[key], str):
        raise ValueError(
            f"--json-key {key}: --input file {place} has {type(record[key]).__name__} under that key, and text is "
            "needed."
        )
    if not isinstance(record, dict) or key not in record:
        keys = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise ValueError(
            f"--json-key {key}: --input file {place} has no text under that key (it has: {keys}). Name the key that "
            "holds the text, or take whole files as text with --format text."
        )
    text: str = record[key]
    return _encodable(text, place, reading)


def _encodable(text: str, place: str, reading: Reading) -> str | None:
    r"""Return a text that UTF-8 can encode, or None where it cannot and may be left out (JSON allows "\ud800")."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        if reading.skip_undecodable:
            return None
        raise ValueError(
            f"--input file {place} has half a surrogate pair, {text[error.start]!a}, at character {error.start} of "
            "its text, which is no Unicode text. Mend the line, or leave it out with --skip-undecodable."
        ) from error
    return text
