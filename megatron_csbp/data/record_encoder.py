# SPDX-License-Identifier: Apache-2.0
"""Turns records into token ids, and marks which of them are learnt.

Arrays: n tokens of a record.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_csbp.data.chat_templates import ChatTemplate, Spans, chat_template
from megatron_csbp.data.records import Chat, Completion, Document, Located, Record, RecordError
from megatron_csbp.data.text_pieces import EncodedPiece, Ids
from megatron_csbp.data.text_tokenizer import TextTokenizer, load_tokenizer

Marks = npt.NDArray[np.uint8]

GENERATION_MARKERS = "generation markers of the chat template"
TURN_BOUNDARIES = "turn boundaries"
COMPLETIONS = "completions"


@dataclass(frozen=True, eq=False)
class Encoded:
    """Tokens of a record.

    Attributes:
        ids: token ids, int32 [n].
        marks: 1 for tokens that are learnt, uint8 [n]; None: all are.
        found_by: how those were found; None for plain text.
    """

    ids: Ids
    marks: Marks | None = None
    found_by: str | None = None


@dataclass(frozen=True)
class Unusable:
    """A record that cannot be used: where it is, and what is wrong."""

    place: str
    what: str


@dataclass(frozen=True)
class RecordEncoder:
    """Encodes records of all kinds.

    Attributes:
        tokenizer: makes the tokens.
        template: renders chats.
        end: id that ends documents and completions; None for none. A chat ends as its template says.
    """

    tokenizer: TextTokenizer
    template: ChatTemplate
    end: int | None = None

    def encode_all(self, records: Sequence[Located]) -> list[Encoded | Unusable]:
        """Encode records, in order.

        Raises:
            ValueError: tokenizer or template cannot do what they are asked for.
        """
        found: list[Encoded | Unusable] = []
        for located in records:
            try:
                found.append(self._encode(located.record))
            except RecordError as error:
                found.append(Unusable(located.place, str(error)))
            except UnicodeEncodeError as error:
                found.append(Unusable(located.place, f"holds text that is no Unicode ({error.reason}). Mend it."))
            except ValueError as error:
                raise ValueError(f"{error} (Seen at {located.place}.)") from error
        return found

    def _encode(self, record: Record) -> Encoded:
        if isinstance(record, Document):
            ids = self.tokenizer.encode(record.text)
            return Encoded(np.append(ids, self._end) if ids.size else ids)
        if isinstance(record, Completion):
            text = record.prompt + record.completion
            piece = self.tokenizer.encode_with_spans(text)
            marks = _marks(piece, len(text), [(len(record.prompt), len(text))])
            ends = np.ones(len(self._end), np.uint8)
            return Encoded(np.append(piece.ids, self._end), np.append(marks, ends), COMPLETIONS)
        return self._encode_chat(record)

    def _encode_chat(self, chat: Chat) -> Encoded:
        text, spans = self.template.render(chat)
        piece = self.tokenizer.encode_with_spans(text)
        marks = _marks(piece, len(text), spans)
        if not marks.any():
            raise RecordError("has only empty answers, so that there is nothing to learn. Remove the record.")
        found_by = GENERATION_MARKERS if self.template.has_markers(chat) else TURN_BOUNDARIES
        return Encoded(piece.ids, marks, found_by)

    @property
    def _end(self) -> Ids:
        return np.array([] if self.end is None else [self.end], dtype=np.int32)


def record_encoder(tokenizer: str, template: str | None, append_eod: bool, eod_token: str | None) -> RecordEncoder:
    """Load tokenizer and template.

    Args:
        tokenizer: `--tokenizer`.
        template: `--chat-template`.
        append_eod: whether documents and completions end with the end-of-document token.
        eod_token: that token, if it is not the tokenizer's own.

    Raises:
        ValueError: one of them cannot be used.
    """
    loaded = load_tokenizer(tokenizer, eod_token)
    end = loaded.require_eod_id() if append_eod else None
    return RecordEncoder(loaded, chat_template(loaded, template), end)


def _marks(piece: EncodedPiece, num_characters: int, spans: Spans) -> Marks:
    """Return which tokens stand for a character of the spans, uint8 [n]; a token may reach over an edge."""
    inside = np.zeros(num_characters + 1, dtype=np.int64)
    for start, stop in spans:
        inside[start:stop] = 1
    before = np.concatenate([[0], np.cumsum(inside)])
    starts, stops = piece.spans[:, 0], piece.spans[:, 1]
    # A token may stand for no character, as the blank that some tokenizers put before a text.
    marks: Marks = (before[np.maximum(stops, starts + 1)] > before[starts]).astype(np.uint8)
    return marks
