# SPDX-License-Identifier: Apache-2.0
"""The words of a shell script with their places in it. Nothing is run, and nothing outside the text is read.

Enough of a shell's grammar for launch scripts: comments, quotes, line continuations, arrays, variables with defaults.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

_REFERENCE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?[-=]([^{}]*))?\}|\$(\w+)")
_SEPARATORS = (";", "&&", "||", "|", "&", "(", ")")


@dataclass(frozen=True)
class Word:
    """A word of a script.

    Attributes:
        text: without quotes, variables as they stand.
        start: its first character in the script.
        end: behind its last character.
        line: its line, from 1.
    """

    text: str
    start: int
    end: int
    line: int


@dataclass(frozen=True)
class Statement:
    """Words up to the end of a command: a line, with those that continue it.

    Attributes:
        words: of the command, or of the array or string that is assigned.
        name: of the variable that is assigned; empty for a command.
        appends: whether they are added to what the variable has (`+=`).
    """

    words: tuple[Word, ...]
    name: str = ""
    appends: bool = False


def statements(script: str) -> list[Statement]:
    """Return the commands and assignments of a script, in their order."""
    found: list[Statement] = []
    place = 0
    while place < len(script):
        assignment = re.compile(r"[ \t]*(?:export[ \t]+|local[ \t]+|readonly[ \t]+)?(\w+)(\+?)=(\()?").match(
            script, place
        )
        if assignment is not None:
            words, place = _words(script, assignment.end(), in_array=assignment[3] is not None)
            if assignment[3] is None and len(words) > 1 and words[0].start == assignment.end():
                # Variables of one command: NAME=value command ...
                found.append(Statement((words[0],), assignment[1]))
                found.append(Statement(tuple(words[1:])))
            else:
                inner = [part for word in words for part in _inner(script, word)]
                found.append(Statement(tuple(inner), assignment[1], assignment[2] == "+"))
        else:
            words, place = _words(script, place, in_array=False)
            if words:
                found.append(Statement(tuple(words)))
    return found


def _words(script: str, place: int, *, in_array: bool) -> tuple[list[Word], int]:
    """Return the words up to the end of a command or of an array, and the place behind it."""
    words: list[Word] = []
    while place < len(script):
        here = script[place]
        if script.startswith("\\\n", place):
            place += 2
        elif here == "#" and (place == 0 or script[place - 1] in " \t\n(;"):
            place = _end_of_line(script, place)
        elif here == "\n" and not in_array:
            return words, place + 1
        elif here in " \t\n\r":
            place += 1
        elif (in_array and here == ")") or (not in_array and here in ";&|"):
            return words, place + 1
        elif not in_array and here in "()":
            place += 1
        else:
            text, end = _word(script, place, in_array)
            words.append(Word(text, place, end, script.count("\n", 0, place) + 1))
            place = end
    return words, place


def _word(script: str, place: int, in_array: bool) -> tuple[str, int]:
    """Return the word that starts here, without quotes, and the place behind it."""
    text = ""
    while place < len(script):
        here = script[place]
        if here in " \t\n\r" or here in (")" if in_array else ";&|()") or script.startswith("\\\n", place):
            break
        if here == "'":
            end = script.find("'", place + 1) % (len(script) + 1)
            text, place = text + script[place + 1 : end], end + 1
        elif here == '"':
            end = _end_of_quote(script, place)
            text, place = text + script[place + 1 : end].replace("\\\n", " "), end + 1
        elif here == "$" and script[place + 1 : place + 2] in ("(", "{"):
            end = _end_of_brackets(script, place + 1)
            text, place = text + script[place:end], end
        elif here == "\\":
            text, place = text + script[place + 1 : place + 2], place + 2
        else:
            text, place = text + here, place + 1
    return text, max(place, 1)


def _inner(script: str, word: Word) -> Iterator[Word]:
    """Split a quoted string that holds several words, as `OPTIONS="--a 1 --b 2"` does; else return the word."""
    raw = script[word.start : word.end]
    is_quoted = len(raw) > 1 and raw[0] == raw[-1] and raw[0] in "\"'"
    # Other quoted words are one value, with its spaces.
    holds_flags = re.match(r"(\s|\\\n)*--", raw[1:-1]) is not None
    if not is_quoted or not holds_flags or not re.search(r"\s", raw.strip("\"' ")):
        yield word
        return
    inner, _ = _words(raw[1:-1].replace("\\\n", "  ").replace("\n", " ") + "\n", 0, in_array=False)
    for part in inner:
        start = word.start + 1 + part.start
        line = script.count("\n", 0, start) + 1
        yield replace(part, start=start, end=word.start + 1 + part.end, line=line)


def resolved(text: str, values: Mapping[str, str]) -> str | None:
    """Return a word with its variables replaced; None if one has no value in the script.

    Args:
        text: the word.
        values: of variables.
    """
    for _ in range(8):
        reference = _REFERENCE.search(text)
        if reference is None:
            return None if "$" in text or "`" in text else text
        name = reference[1] or reference[3]
        value = values.get(name, reference[2])
        if value is None:
            return None
        text = text[: reference.start()] + value.strip("\"'") + text[reference.end() :]
    return None


def references(text: str) -> list[str]:
    """Return the names of the variables in a word."""
    return [found[1] or found[3] for found in _REFERENCE.finditer(text)]


def _end_of_line(script: str, place: int) -> int:
    end = script.find("\n", place)
    return len(script) if end < 0 else end


def _end_of_quote(script: str, place: int) -> int:
    end = place + 1
    while end < len(script) and script[end] != '"':
        end += 2 if script[end] == "\\" else 1
    return min(end, len(script))


def _end_of_brackets(script: str, place: int) -> int:
    """Return the place behind the bracket that closes the one here."""
    closing = {"(": ")", "{": "}"}[script[place]]
    depth = 0
    for end in range(place, len(script)):
        depth += (script[end] == script[place]) - (script[end] == closing)
        if depth == 0:
            return end + 1
    return len(script)
