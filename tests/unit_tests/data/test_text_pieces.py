# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from megatron_csbp.data import text_pieces, text_sources, text_tokenizer
from megatron_csbp.data.text_pieces import EncodedPiece, encode_in_pieces
from megatron_csbp.data.text_tokenizer import TextTokenizer

TEXT = "".join(Path(module.__file__).read_text() for module in (text_pieces, text_sources, text_tokenizer))
PRE_TOKENIZERS = {
    "byte level": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "byte level with a prefix space": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "metaspace": pre_tokenizers.Metaspace(prepend_scheme="always"),
}


def trained(pre_tokenizer: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


class Recorded:
    """Encodes, and notes how long each text was."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.lengths: list[int] = []
        self._tokenizer = TextTokenizer("test", tokenizer, 400, None)

    def __call__(self, text: str) -> EncodedPiece:
        self.lengths.append(len(text))
        return self._tokenizer._encode_piece(text)


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_pieces_have_the_ids_of_the_whole(name: str) -> None:
    tokenizer = trained(PRE_TOKENIZERS[name])
    text = TEXT + "größer \N{GRINNING FACE} and — so on\n" * 40
    expected = tokenizer.encode(text, add_special_tokens=False)
    for piece in (997, 1000, 2048, 5000):
        encode = Recorded(tokenizer)
        found = encode_in_pieces(text, encode, piece, 400)
        np.testing.assert_array_equal(found.ids, expected.ids)
        np.testing.assert_array_equal(found.spans, expected.offsets)
        assert max(encode.lengths) <= piece + 400
        assert len(encode.lengths) >= len(text) // (piece + 400)


def test_a_text_on_whose_cuts_pieces_do_not_agree_is_encoded_whole() -> None:
    tokenizer = trained(PRE_TOKENIZERS["byte level"])
    text = "e" * 1003 + "".join(chr(ord("a") + number % 26) for number in range(3000))
    encode = Recorded(tokenizer)
    expected = tokenizer.encode(text, add_special_tokens=False).ids
    np.testing.assert_array_equal(encode_in_pieces(text, encode, 1000, 20).ids, expected)
    assert max(encode.lengths) == len(text)


def test_a_tokenizer_cuts_what_is_longer_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TextTokenizer("test", trained(PRE_TOKENIZERS["byte level"]), 400, None)
    whole = tokenizer.encode(TEXT)
    asked: list[str] = []

    def in_pieces(text: str, encode: Callable[[str], EncodedPiece]) -> EncodedPiece:
        asked.append(text)
        return encode(text)

    monkeypatch.setattr(text_tokenizer, "PIECE_CHARACTERS", 100)
    monkeypatch.setattr(text_tokenizer, "encode_in_pieces", in_pieces)
    np.testing.assert_array_equal(tokenizer.encode(TEXT), whole)
    assert asked == [TEXT]
