# SPDX-License-Identifier: Apache-2.0
"""Renders chats by a chat template, and finds the assistant's answers in the text.

The template's own `{% generation %}` markers say where answers are. Without them an answer is what a turn adds behind
the prompt for it: rendered with one more message, the text must go on where the shorter one ended.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_csbp.data.records import Chat, Message, RecordError
from megatron_csbp.data.text_tokenizer import TextTokenizer

CHATML = "chatml"
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
CHATML_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""ChatML, as Qwen and many others write it, with markers and without anything of a model's own."""

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REMEDY = (
    "Give --chat-template FILE with the template and {% generation %} markers around what the assistant says; or "
    f"--chat-template {CHATML}, for a tokenizer with {' and '.join(CHATML_TOKENS)}."
)

Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template of a tokenizer.

    Attributes:
        source: where it is from, for messages.
        tokenizer: the tokenizer that it is for.
        given: the template, if it is not the tokenizer's own.
    """

    source: str
    tokenizer: TextTokenizer
    given: str | None = None

    def render(self, chat: Chat) -> tuple[str, Spans]:
        """Return the text of a chat, and the first and last-plus-one character of each answer that is learnt.

        Raises:
            RecordError: the template refuses the chat.
            ValueError: answers cannot be found by this template.
        """
        if self.has_markers(chat):
            return self._by_markers(chat)
        return self._by_turns(chat)

    def has_markers(self, chat: Chat) -> bool:
        """Return whether the template marks answers itself (a tokenizer may have another one for tools)."""
        return _MARKER.search(self._template(chat)) is not None

    @property
    def _hugging_face(self) -> Any:
        assert self.tokenizer.hugging_face is not None, "load_tokenizer gives one"
        return self.tokenizer.hugging_face()

    def _template(self, chat: Chat) -> str:
        try:
            template: str = self._hugging_face.get_chat_template(self.given, chat.tools)
        except ValueError as error:
            raise ValueError(
                f"{self.source} has no chat template, and there are chats in the data. {_REMEDY}"
            ) from error
        return template

    def _by_markers(self, chat: Chat) -> tuple[str, Spans]:
        text, found = self._rendered(chat, chat.messages, with_markers=True)
        spans = [(int(start), int(stop)) for start, stop in found if stop > start]
        if chat.first_learnt:
            answers = sum(message["role"] == "assistant" for message in chat.messages)
            if len(found) != answers:
                raise RecordError(
                    f"has {answers} messages of the assistant, for which the chat template marks {len(found)} "
                    "answers, so that those of the completion are not known. Write it as messages alone."
                )
            spans = [(int(start), int(stop)) for start, stop in found[-len(chat.answers) :]]
        if not spans:
            raise RecordError("has no answer that the chat template marks. Remove the record.")
        return text, spans

    def _by_turns(self, chat: Chat) -> tuple[str, Spans]:
        text, _ = self._rendered(chat, chat.messages)
        spans: Spans = []
        for number in chat.answers:
            if number == 0:
                raise RecordError(
                    "begins with a message of the assistant, for which there is no prompt. Put the user's before it."
                )
            before, _ = self._rendered(chat, chat.messages[:number], prompts=True)
            through, _ = self._rendered(chat, chat.messages[: number + 1])
            if not (through.startswith(before) and text.startswith(through)):
                raise ValueError(
                    f"{self.source} has a chat template without {{% generation %}} markers that renders message "
                    f"{number + 1} differently when others follow, so that answers cannot be found. {_REMEDY}"
                )
            spans.append((len(before), len(through)))
        return text, spans

    def _rendered(
        self, chat: Chat, messages: Sequence[Message], prompts: bool = False, with_markers: bool = False
    ) -> tuple[str, Spans]:
        """Return the text of some messages, and the spans of markers."""
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                [list(messages)],
                tools=chat.tools,
                chat_template=self._template(chat),
                add_generation_prompt=prompts,
                return_assistant_tokens_mask=with_markers,
                **self._hugging_face.special_tokens_map,
            )
        except (TemplateError, TypeError, LookupError, AttributeError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise RecordError(f"is refused by the chat template ({reason}). Mend its messages.") from error
        return texts[0], spans[0] if with_markers else []


def chat_template(tokenizer: TextTokenizer, asked: str | None) -> ChatTemplate:
    """Return the template that chats are rendered by.

    Args:
        tokenizer: its own template is taken if none is asked for.
        asked: `--chat-template`: a Jinja file, or `chatml`.

    Raises:
        ValueError: there is no such file, or the tokenizer lacks tokens of ChatML.
    """
    source = f"--tokenizer {tokenizer.name}"
    if asked is None:
        return ChatTemplate(source, tokenizer)
    if asked == CHATML:
        missing = [token for token in CHATML_TOKENS if tokenizer.token_id(token) is None]
        if missing:
            raise ValueError(
                f"--chat-template {CHATML}: {source} has no token {' and '.join(missing)}. Use the tokenizer's own "
                "template, or give --chat-template FILE."
            )
        return ChatTemplate(f"--chat-template {CHATML}", tokenizer, CHATML_TEMPLATE)
    try:
        template = Path(asked).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--chat-template {asked} cannot be read: {error}. Give a file with a Jinja template, or {CHATML}."
        ) from error
    return ChatTemplate(f"--chat-template {asked}", tokenizer, template)
