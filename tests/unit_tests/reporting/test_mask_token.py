# SPDX-License-Identifier: Apache-2.0
"""The summary names the mask token, and warns where clean text can look corrupted."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import global_vars

from megatron_csbp.data import text_sources
from megatron_csbp.data.train_tokenizer import train_tokenizer
from megatron_csbp.reporting.mask_token import mask_token_lines
from tests.unit_tests.data.support import megatron_args, write_indexed

TEXT = Path(text_sources.__file__).read_text()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([TEXT], folder, 300)
    off = "chat_template vocab_file merge_file special_tokens metadata_path tokenizer_hf_no_use_fast trust_remote_code"
    absent = dict.fromkeys([*off.split(), "tokenizer_hf_no_include_special_tokens"])
    named = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}
    return build_tokenizer(megatron_args(**{**absent, **named}))


def lines(monkeypatch: pytest.MonkeyPatch, tokenizer: Any, mask: int, **data: Any) -> list[str]:
    monkeypatch.setattr(global_vars, "get_tokenizer", lambda: tokenizer)
    return mask_token_lines(megatron_args(mask_token_id=mask, **(data or {"mock_data": True})))


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
        "from a clean one. Use --mask-token-id 1, which the tokenizer declares."
    )


def test_an_id_that_the_data_have_is_warned_of_whatever_the_tokenizer_says(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prefix = write_indexed(tmp_path / "a", [np.array([5, 1, 7, 1, 9])] * 20)
    _, warning = lines(monkeypatch, tokenizer, 1, data_path=[prefix])
    assert "--mask-token-id 1: 40 of 100 tokens read of the data have this id, so" in warning
    assert warning.endswith("Use an id that no text yields, for example in the padding of the vocabulary.")
    assert len(lines(monkeypatch, tokenizer, 2, data_path=[prefix])) == 2
    assert len(lines(monkeypatch, tokenizer, 300, data_path=["0.5", prefix, "0.5", prefix])) == 1
