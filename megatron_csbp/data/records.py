# SPDX-License-Identifier: Apache-2.0
"""What one record of a data file is: a document, a prompt with its completion, or a chat."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

KINDS = ("auto", "text", "pairs", "chats")
_ASSISTANT = "assistant"

Message = dict[str, Any]


class RecordError(ValueError):
    """A record that cannot be used. The message says what is wrong and what to do, behind the record's place."""


@dataclass(frozen=True)
class Document:
    """Plain text, all of which is learnt."""

    text: str


@dataclass(frozen=True)
class Completion:
    """A text of which only the second part is learnt."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Chat:
    """A conversation, of which the assistant's messages are learnt.

    Attributes:
        messages: role, content and whatever else the chat template reads.
        first_learnt: index of the first message that is learnt if it is the assistant's.
        tools: what the template is told of tools.
    """

    messages: list[Message]
    first_learnt: int = 0
    tools: list[Any] | None = None

    @property
    def answers(self) -> list[int]:
        """Indices of the messages that are learnt."""
        return [
            number
            for number, message in enumerate(self.messages)
            if number >= self.first_learnt and message["role"] == _ASSISTANT
        ]


Record = Document | Completion | Chat


@dataclass(frozen=True)
class Located:
    """A record and where it is from, in words: `FILE, line 3`."""

    place: str
    record: Record


@dataclass
class Faults:
    """Records that cannot be used: an error, or left out and counted.

    Attributes:
        skips: whether they are left out.
        count: how many were.
        first: what was wrong with the first few.
    """

    skips: bool = False
    count: int = 0
    first: list[str] = field(default_factory=list)
    shown: int = 3

    def add(self, place: str, what: str) -> None:
        """Note a record that cannot be used.

        Args:
            place: where it is.
            what: what is wrong, and what to do.

        Raises:
            ValueError: nothing is left out.
        """
        said = f"--input file {place}, {what}"
        if not self.skips:
            raise ValueError(f"{said} Or leave such records out with --on-error skip.")
        self.count += 1
        if len(self.first) < self.shown:
            self.first.append(said)

    def lines(self) -> list[str]:
        """Say what was left out."""
        if not self.count:
            return []
        more = f"; and {self.count - len(self.first)} more" * (self.count > len(self.first))
        return [f"left out {self.count} records that cannot be used: {' '.join(self.first)}{more}"]


def record_from(fields: Any, kind: str, json_key: str) -> Record:
    """Return the record that a JSON object or a row of a table is.

    Args:
        fields: the object.
        kind: one of `KINDS`; `auto` goes by the keys.
        json_key: key of the text of a document.

    Raises:
        RecordError: it is none of them, or more than one.
    """
    if not isinstance(fields, Mapping):
        raise RecordError(f"is {type(fields).__name__} and no object with keys. Each line must be one JSON object.")
    keys = {"text": (json_key,), "pairs": ("prompt", "completion"), "chats": ("messages",)}
    there = [name for name, wanted in keys.items() if all(fields.get(key) is not None for key in wanted)]
    if kind != "auto":
        there = [name for name in there if name == kind]
    if len(there) != 1:
        has = ", ".join(map(str, fields)) or "nothing"
        wanted = " or ".join(" and ".join(keys[name]) for name in keys if kind in ("auto", name))
        if there:
            raise RecordError(f"is more than one kind of record (it has: {has}). Say which with --kind {there[0]}.")
        raise RecordError(
            f"has no {wanted} (it has: {has}). Name the key that holds a document's text with --json-key, or take "
            "whole files as text with --format text."
        )
    if there == ["text"]:
        return Document(_text(fields[json_key], f"under the key {json_key}"))
    if there == ["chats"]:
        return _chat(_messages(fields["messages"], "messages"), 0, fields.get("tools"))
    return _pair(fields)


def texts_of(record: Record) -> Iterator[str]:
    """Yield the texts in a record, which a tokenizer learns from."""
    if isinstance(record, Document):
        yield record.text
    elif isinstance(record, Completion):
        yield record.prompt
        yield record.completion
    else:
        yield from (message["content"] for message in record.messages if message.get("content"))


def check_encodable(text: str, where: str = "its text") -> None:
    r"""Check that UTF-8 can encode a text (JSON allows "\ud800").

    Raises:
        RecordError: it cannot.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RecordError(
            f"has half a surrogate pair, {text[error.start]!a}, at character {error.start} of {where}, which is no "
            "Unicode text. Mend it."
        ) from error


def _pair(fields: Mapping[str, Any]) -> Record:
    """Return prompt and completion, each a text or a list of messages."""
    prompt, completion = fields["prompt"], fields["completion"]
    if isinstance(prompt, list) or isinstance(completion, list):
        before = _messages(prompt, "prompt", may_be_empty=True)
        return _chat([*before, *_messages(completion, "completion")], len(before), fields.get("tools"))
    pair = Completion(_text(prompt, "under the key prompt"), _text(completion, "under the key completion"))
    if not pair.completion:
        raise RecordError("has an empty completion, so that there is nothing to learn. Remove the record.")
    return pair


def _chat(messages: list[Message], first_learnt: int, tools: Any) -> Chat:
    if tools is not None and not isinstance(tools, list):
        raise RecordError(f"has {type(tools).__name__} under the key tools, and a list is needed.")
    chat = Chat(messages, first_learnt, tools or None)
    if not chat.answers:
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages[first_learnt:]))
        raise RecordError(
            f"has no message with the role {_ASSISTANT} (roles: {roles}), so that there is nothing to learn. Remove "
            "the record, or rename the role."
        )
    return chat


def _messages(value: Any, key: str, may_be_empty: bool = False) -> list[Message]:
    """Return messages that a template can read; keys without a value are left out."""
    example = '[{"role": "user", "content": "..."}, ...]'
    if not isinstance(value, list) or not (value or may_be_empty):
        state = "an empty list" if value == [] else type(value).__name__
        raise RecordError(f"has {state} under the key {key}, and a list of messages is needed: {example}.")
    messages = []
    for number, message in enumerate(value, start=1):
        where = f"message {number} of {key}"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RecordError(f"has a {where} without a role, and each needs one: {example}.")
        kept = {name: content for name, content in message.items() if content is not None}
        if "content" in kept or not kept.get("tool_calls"):
            _text(kept.get("content"), f"as content of {where}")
        messages.append(kept)
    return messages


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise RecordError(f"has {type(value).__name__} {where}, and text is needed. Write it as a string.")
    check_encodable(value)
    return value
