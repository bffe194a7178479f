# SPDX-License-Identifier: Apache-2.0
"""Finds and reads the documents of text files, folders and JSONL files, for preparation."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

JSON_LINES_SUFFIXES = (".jsonl", ".ndjson")


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
            matches = {match for pattern in patterns for match in path.rglob(pattern) if match.is_file()}
            found += sorted(m for m in matches if not any(part.startswith(".") for part in m.relative_to(path).parts))
        else:
            raise ValueError(f"--input {name} does not exist. Give text files, JSONL files or folders.")
    if not found:
        raise ValueError(
            f"--input {' '.join(inputs)} holds no file that matches --glob {' '.join(patterns)}. Give another folder "
            "or pattern, for example --glob '*.txt'."
        )
    return list(dict.fromkeys(found))


def read_documents(path: Path, json_key: str, skip_undecodable: bool = False) -> Iterator[str]:
    """Yield the texts of a file's documents: each line of a JSONL file, else the whole file.

    Args:
        path: the file.
        json_key: key of the text in each JSON object.
        skip_undecodable: leave out documents that are not UTF-8 text, instead of an error.

    Yields:
        Texts, one line of a JSONL file read at a time.

    Raises:
        ValueError: the file cannot be read, a document is not UTF-8, or a line is not a JSON object with that text.
    """
    try:
        if path.suffix in JSON_LINES_SUFFIXES:
            with path.open("rb") as stream:
                for number, line in enumerate(stream, start=1):
                    place = f"{path}, line {number},"
                    text = _decoded(line, place, skip_undecodable)
                    if text is not None and text.strip():
                        yield _text_of(text, json_key, place)
        else:
            text = _decoded(path.read_bytes(), str(path), skip_undecodable)
            if text is not None:
                yield text
    except OSError as error:
        raise ValueError(f"--input file {path} cannot be read: {error.strerror or error}.") from error


def _decoded(data: bytes, place: str, skip_undecodable: bool) -> str | None:
    """Return bytes as text, or None where they are none and may be left out."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        if skip_undecodable:
            return None
        raise ValueError(
            f"--input file {place} is not UTF-8 text (byte {error.start}). Convert it, choose files with --glob, or "
            "leave out what is not UTF-8 with --skip-undecodable."
        ) from error


def _text_of(line: str, json_key: str, place: str) -> str:
    """Return the text of one JSON line."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"--input file {place} is not JSON ({error.msg}). Each line must be one JSON object."
        ) from error
    if isinstance(record, dict) and json_key in record and not isinstance(record[json_key], str):
        raise ValueError(
            f"--json-key {json_key}: --input file {place} has {type(record[json_key]).__name__} under that key, and "
            "text is needed."
        )
    if not isinstance(record, dict) or json_key not in record:
        keys = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise ValueError(
            f"--json-key {json_key}: --input file {place} has no text under that key (it has: {keys}). Name the key "
            "that holds the text."
        )
    text: str = record[json_key]
    return text
