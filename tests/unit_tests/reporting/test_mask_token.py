# SPDX-License-Identifier: Apache-2.0
"""The summary names the mask token, and warns where clean text can look corrupted."""

from pathlib import Path
from typing import Any

import pytest
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import global_vars

from megatron_csbp.data import text_sources
from megatron_csbp.data.train_tokenizer import train_tokenizer
from megatron_csbp.reporting.mask_token import mask_token_lines
from tests.unit_tests.data.support import megatron_args

TEXT = Path(text_sources.__file__).read_text()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([TEXT], folder, 300)
    off = "chat_template vocab_file merge_file special_tokens metadata_path tokenizer_hf_no_use_fast trust_remote_code"
    absent = dict.fromkeys([*off.split(), "tokenizer_hf_no_include_special_tokens"])
    named = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}
    return build_tokenizer(megatron_args(**{**absent, **named}))


def lines(monkeypatch: pytest.MonkeyPatch, tokenizer: Any, mask: int) -> list[str]:
    monkeypatch.setattr(global_vars, "get_tokenizer", lambda: tokenizer)
    return mask_token_lines(megatron_args(mask_token_id=mask, padded_vocab_size=304))


def test_the_declared_mask_and_an_id_beyond_the_vocabulary_are_named(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lines(monkeypatch, tokenizer, 1) == ["  mask token 1: '<|mask|>', the mask that the tokenizer declares"]
    assert lines(monkeypatch, tokenizer, 300) == ["  mask token 300: no token of the tokenizer, which has 300"]
    assert lines(monkeypatch, tokenizer, 0) == ["  mask token 0: '<|endoftext|>', a special token"]


def test_an_ordinary_token_is_warned_of_with_the_declared_one(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (space,) = tokenizer.tokenize(" ")
    said, warning = lines(monkeypatch, tokenizer, space)
    assert said == f"  mask token {space}: ' ', an ordinary token"
    assert warning == (
        f"  WARNING: --mask-token-id {space}: it stands for ordinary text, so the model cannot tell a corrupted token "
        "from a clean one where a text holds it. Use --mask-token-id 1, which the tokenizer declares, or "
        "--mask-token-id 300, a spare row of the padded vocabulary, or a tokenizer with a mask token of its own "
        "(python -m megatron_csbp.data.train_tokenizer)."
    )
