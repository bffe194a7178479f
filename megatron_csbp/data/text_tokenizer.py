# SPDX-License-Identifier: Apache-2.0
"""Hugging Face tokenizers for preparation: a name, a folder, or a tokenizer.json file."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_csbp.configuration.hub_rules import require_hub
from megatron_csbp.data.text_pieces import PIECE_CHARACTERS, EncodedPiece, Ids, encode_in_pieces


@dataclass(frozen=True, eq=False)
class TextTokenizer:
    """A tokenizer that turns text into ids, without adding special tokens.

    Attributes:
        name: what it was loaded from.
        backend: a `tokenizers.Tokenizer`, or a `transformers` tokenizer that is written in Python.
        vocab_size: largest id it can yield, added tokens too, plus 1 (ids may have gaps).
        eod_id: id of the end-of-document token, or None.
        mask_id: id of the mask token that it names, or None.
        hugging_face: makes the `transformers` tokenizer, which has the chat template.
    """

    name: str
    backend: Any
    vocab_size: int
    eod_id: int | None
    mask_id: int | None = None
    hugging_face: Callable[[], Any] | None = None

    def encode(self, text: str) -> Ids:
        """Return the token ids of a text, int32 [n]; of a long one in bounded memory."""
        if not hasattr(self.backend, "encode_batch_fast"):
            return np.array(self.backend.encode(text, add_special_tokens=False), dtype=np.int32)
        if len(text) > PIECE_CHARACTERS:
            return encode_in_pieces(text, self._encode_piece).ids
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.int32)

    def encode_with_spans(self, text: str) -> EncodedPiece:
        """Return the tokens of a text and the characters that each stands for.

        Raises:
            ValueError: the tokenizer is one of those that do not say which.
        """
        if not hasattr(self.backend, "encode_batch_fast"):
            raise ValueError(
                f"--tokenizer {self.name} is written in Python and does not say which characters a token stands for, "
                "so that answers cannot be marked. Use its fast version (a folder with tokenizer.json)."
            )
        if len(text) > PIECE_CHARACTERS:
            return encode_in_pieces(text, self._encode_piece)
        return self._encode_piece(text)

    def _encode_piece(self, text: str) -> EncodedPiece:
        """Return the ids of a piece of text and where they lie."""
        encoding = self.backend.encode(text, add_special_tokens=False)
        spans = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        return EncodedPiece(np.array(encoding.ids, dtype=np.int32), spans)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token, or None if it is not in the vocabulary."""
        found: int | None = self.backend.get_vocab().get(token)
        return found

    def require_eod_id(self) -> int:
        """Return the end-of-document id.

        Raises:
            ValueError: the tokenizer names none.
        """
        if self.eod_id is None:
            raise ValueError(
                f"--append-eod: the tokenizer {self.name} names no end-of-document token. Name one that it has, for "
                "example --eod-token '<|endoftext|>', or leave out --append-eod."
            )
        return self.eod_id


def load_tokenizer(name: str, eod_token: str | None = None) -> TextTokenizer:
    """Load a tokenizer.

    Args:
        name: a `tokenizer.json` file, a folder, or a name that transformers' AutoTokenizer knows.
        eod_token: end-of-document token, where it is not the tokenizer's own EOS token.

    Raises:
        ValueError: it cannot be loaded, or does not have that token.
    """
    if Path(name).is_file():
        return _from_json_file(name, eod_token)
    require_hub("--tokenizer", name)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"--tokenizer {name} cannot be loaded: {reason} Give a tokenizer.json file, a folder with one, "
            "or the name of a Hugging Face model."
        ) from error
    # The text's own length is no error here: samples are cut later.
    tokenizer.model_max_length = 1 << 62
    backend = _uncut(tokenizer.backend_tokenizer) if tokenizer.is_fast else tokenizer
    vocabulary = tokenizer.get_vocab()
    eod_id = tokenizer.eos_token_id if eod_token is None else vocabulary.get(eod_token)
    _check_eod_token(name, eod_token, eod_id)
    size = max(vocabulary.values(), default=-1) + 1
    return TextTokenizer(name, backend, size, eod_id, tokenizer.mask_token_id, lambda: tokenizer)


def _uncut(tokenizer: Any) -> Any:
    """Return a `tokenizers.Tokenizer` that neither cuts nor pads, whatever its file says.

    Nor does it process what it made: that adds special tokens, which are not asked for, and takes blanks out of the
    characters that a token stands for.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.post_processor = None
    return tokenizer


def _from_json_file(name: str, eod_token: str | None) -> TextTokenizer:
    """Load a file of the tokenizers library."""
    from tokenizers import Tokenizer

    try:
        tokenizer = _uncut(Tokenizer.from_file(name))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(
            f"--tokenizer {name} is not a tokenizer file of the tokenizers library ({error}). Give a tokenizer.json "
            "file, a folder with one, or the name of a Hugging Face model."
        ) from error
    eod_id = None if eod_token is None else tokenizer.token_to_id(eod_token)
    _check_eod_token(name, eod_token, eod_id)
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def hugging_face() -> Any:
        # Imported late: it takes seconds, and only chats need it.
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(tokenizer_object=tokenizer)

    return TextTokenizer(name, tokenizer, vocab_size, eod_id, hugging_face=functools.cache(hugging_face))


def _check_eod_token(name: str, eod_token: str | None, eod_id: int | None) -> None:
    """Refuse an end-of-document token that the tokenizer does not have."""
    if eod_token is not None and eod_id is None:
        raise ValueError(
            f"--eod-token {eod_token} is not in the vocabulary of --tokenizer {name}. Name one of its tokens."
        )
