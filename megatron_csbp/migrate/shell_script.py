# SPDX-License-Identifier: Apache-2.0
"""What a launch script trains with: the training script that it starts, and the flags that it passes. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_csbp.migrate.shell_words import Statement, Word, references, resolved, statements

_TRAINING_SCRIPT = re.compile(r"(^|/)(pretrain|train|finetune)\w*\.py$")
_STARTERS = ("torchrun", "python", "python3", "srun", "deepspeed", "accelerate", "mpirun", "bash", "exec")


@dataclass(frozen=True)
class Given:
    """A flag that a script passes to the training.

    Attributes:
        flag: as it is spelled, "--lr".
        values: its values with variables replaced; None for one that the script does not know.
        raw: its values as they stand.
        start: its place in the script.
        end: behind its last value.
        line: of the flag.
    """

    flag: str
    values: tuple[str | None, ...]
    raw: tuple[str, ...]
    start: int
    end: int
    line: int


@dataclass(frozen=True)
class Launch:
    """How a script starts the training.

    Attributes:
        script: the word that names the training script; None where a file holds flags alone.
        path: the script, with variables replaced.
        flags: that it is given, in their order.
        has_module: whether the word is the value of `-m`.
    """

    script: Word | None
    path: str
    flags: tuple[Given, ...]
    has_module: bool = False


def read_launch(text: str) -> Launch | None:
    """Find how a shell script starts the training; None if it does not.

    A file of flags alone is read too.
    """
    found = statements(text)
    values = _values(found)
    arrays = _arrays(found)
    for statement in reversed(found):
        if statement.name:
            continue
        for place, word in enumerate(statement.words):
            path = resolved(word.text, values)
            if path is None or not _TRAINING_SCRIPT.search(path) or not _starts(statement.words[:place]):
                continue
            passed = list(_expanded(statement.words[place + 1 :], arrays))
            return Launch(word, path, tuple(_flags(passed, values, text)))
    loose = [word for statement in found for word in statement.words if not statement.name]
    if loose and loose[0].text.startswith("--"):
        return Launch(None, "", tuple(_flags(loose, values, text)))
    return None


def _starts(before: Sequence[Word]) -> bool:
    """Return whether a command with these words before the training script runs it, and does not only name it."""
    commands = [word.text.rpartition("/")[2] for word in before]
    return any(command in _STARTERS or command.startswith(("python", "${", "$")) for command in commands)


def _values(found: Sequence[Statement]) -> dict[str, str]:
    """Return the variables that are given one plain value; the first counts, as defaults come before conditions."""
    values: dict[str, str] = {}
    for statement in found:
        if statement.name and not statement.appends and len(statement.words) == 1:
            values.setdefault(statement.name, statement.words[0].text)
    return values


def _arrays(found: Sequence[Statement]) -> dict[str, list[Word]]:
    arrays: dict[str, list[Word]] = {}
    for statement in found:
        if statement.name:
            arrays.setdefault(statement.name, []).extend(statement.words)
    return arrays


def _expanded(words: Sequence[Word], arrays: Mapping[str, Sequence[Word]], depth: int = 0) -> Iterator[Word]:
    """Put the words of an array in the place of its name."""
    for word in words:
        names = references(word.text)
        is_whole = len(names) == 1 and re.fullmatch(r"\$\{?\w+(\[[@*]\])?\}?", word.text) is not None
        if is_whole and depth < 4 and _holds_flags(names[0], arrays, depth):
            yield from _expanded(arrays[names[0]], arrays, depth + 1)
        else:
            yield word


def _holds_flags(name: str, arrays: Mapping[str, Sequence[Word]], depth: int) -> bool:
    """Return whether a variable, or one that it names, holds flags."""
    return any(
        word.text.startswith("--")
        or (depth < 4 and any(_holds_flags(inner, arrays, depth + 1) for inner in references(word.text)))
        for word in arrays.get(name, ())
    )


def _flags(words: Sequence[Word], values: Mapping[str, str], text: str) -> Iterator[Given]:
    """Group words into flags with their values."""
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if not word.text.startswith("--"):
            continue
        flag, equals, value = word.text.partition("=")
        raw, end = [value] if equals else [], word.end
        while place < len(words) and not words[place].text.startswith("--") and words[place].start >= end:
            if not _is_value(words[place], word, text):
                break
            raw.append(words[place].text)
            end = words[place].end
            place += 1
        known = tuple(resolved(value, values) for value in raw)
        yield Given(flag, known, tuple(raw), word.start, end, word.line)


def _is_value(word: Word, flag: Word, text: str) -> bool:
    """Return whether a word belongs to a flag: no other array and no end of a command lies between them."""
    return not re.search(r"[()]", text[flag.end : word.start])
