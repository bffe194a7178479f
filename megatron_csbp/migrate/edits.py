# SPDX-License-Identifier: Apache-2.0
"""Changes of a text, each with its reason, and the text that they make. Pure."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Edit:
    """A change of a text.

    Attributes:
        start: first character that is replaced.
        end: behind the last.
        text: what stands there instead.
        reason: why, with what is changed.
        line: of the text, from 1.
    """

    start: int
    end: int
    text: str
    reason: str
    line: int


@dataclass(frozen=True)
class Migration:
    """A job that was made one of block diffusion.

    Attributes:
        name: of the file.
        before: its text.
        edits: what changes.
        obstacles: what stands in the way, a line each.
        notes: what else to know or to do.
        flags: the flags of the changed job, as far as their values are known, for the check.
        unknown: flags whose values only the job itself knows.
    """

    name: str
    before: str
    edits: Sequence[Edit]
    obstacles: Sequence[str]
    notes: Sequence[str] = ()
    flags: Sequence[str] = ()
    unknown: Sequence[str] = field(default=())

    @property
    def after(self) -> str:
        """The changed text."""
        text = self.before
        for edit in sorted(self.edits, key=lambda edit: -edit.start):
            text = text[: edit.start] + edit.text + text[edit.end :]
        return text

    @property
    def diff(self) -> str:
        """The change as a unified diff, which `patch` takes."""
        before, after = (text.splitlines(keepends=True) for text in (self.before, self.after))
        lines = difflib.unified_diff(before, after, self.name, self.name)
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def removal(text: str, start: int, end: int, reason: str) -> Edit:
    """Take a flag and its values out, and the whole line if nothing else is on it."""
    first = text.rfind("\n", 0, start) + 1
    last = text.find("\n", end)
    last = len(text) if last < 0 else last
    rest = text[first:start] + text[end:last]
    line = text.count("\n", 0, start) + 1
    # A lone continuation or the quotes around the flag go with it.
    if re.fullmatch(r"\s*(?:\"\s*\"|'\s*')?\s*\\?\s*", rest):
        return Edit(first, min(last + 1, len(text)), "", reason, line)
    while start > first and text[start - 1] in " \t" and (end == last or text[end] in " \t\n"):
        start -= 1
    return Edit(start, end, "", reason, line)
