# SPDX-License-Identifier: Apache-2.0
"""Marks of answers are exact to the token, whatever a tokenizer does with blanks and accents."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from megatron_csbp.data import records
from megatron_csbp.data.record_encoder import Encoded, record_encoder
from megatron_csbp.data.records import Chat, Completion, Located

TEXT = Path(records.__file__).read_text() + " große e\u0301 Fragen? 12 sure. \n\n"
PRE_TOKENIZERS = {
    "metaspace before the first word": (pre_tokenizers.Metaspace(prepend_scheme="first"), decoders.Metaspace()),
    "metaspace before every word": (pre_tokenizers.Metaspace(prepend_scheme="always"), decoders.Metaspace()),
    "bytes, with a blank before the text": (pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()),
    "bytes": (pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()),
}
CHAT = Chat(
    [
        {"role": "user", "content": "große Fragen e\u0301? "},
        {"role": "assistant", "content": "  sure. e\u0301 12\n"},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "final"},
    ]
)


def tokenizer_file(name: str, folder: Path) -> Path:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = PRE_TOKENIZERS[name]
    tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<unk>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if "bytes" in name else [],
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_the_marked_tokens_are_the_answers(name: str, tmp_path: Path) -> None:
    path = tokenizer_file(name, tmp_path)
    tokenizer = Tokenizer.from_file(str(path))
    encoder = record_encoder(str(path), "chatml", append_eod=False, eod_token=None)
    (chat, pair) = encoder.encode_all([Located("a", CHAT), Located("b", Completion("What:", " sure. 12"))])
    assert isinstance(chat, Encoded)
    assert isinstance(pair, Encoded)
    assert chat.marks is not None
    assert pair.marks is not None
    edges = np.diff(np.concatenate([[0], chat.marks.astype(int), [0]]))
    answers = [
        "".join(tokenizer.id_to_token(token) for token in chat.ids[start:stop]).replace("\u2581", " ")
        for start, stop in zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True)
    ]
    if "bytes" in name:
        for written, meant in (("\u0120", " "), ("\u010a", "\n"), ("\u00c3\u00a9", "\u00e9")):
            answers = [answer.replace(written, meant) for answer in answers]
    assert answers == ["  sure. \u00e9 12\n<|im_end|>", "final<|im_end|>"]
    first = int(np.argmax(pair.marks))
    assert tokenizer.id_to_token(int(pair.ids[first]))[0] in "\u2581\u0120"
    assert pair.marks[first:].all()
    assert pair.found_by == "completions"
