# SPDX-License-Identifier: Apache-2.0
"""A vocabulary may be padded otherwise and may grow; tokens may not be lost."""

from argparse import Namespace

import pytest

from megatron_csbp.configuration.vocabulary_rules import check_padded_vocabulary

SAVED = Namespace(padded_vocab_size=256, make_vocab_size_divisible_by=32, tensor_model_parallel_size=2)


def check(padded_vocab_size: int, saved: Namespace = SAVED) -> list[str]:
    return check_padded_vocabulary(Namespace(padded_vocab_size=padded_vocab_size), saved, "--load x")


def test_an_equal_vocabulary_is_not_worth_a_word() -> None:
    assert check(256) == []


def test_a_vocabulary_may_grow() -> None:
    assert check(257) == ["the embedding grows from 256 to 257 rows: Megatron starts the added ones at 0"]


def test_padding_may_be_dropped_but_no_token() -> None:
    assert check(193) == ["the embedding shrinks from 256 to 193 rows: padding is dropped"]
    with pytest.raises(ValueError, match=r"192 tokens with padding, and 256 .* at most 63 are padding: tokens would"):
        check(192)


def test_a_checkpoint_that_does_not_say_its_vocabulary_is_accepted() -> None:
    assert check(192, Namespace()) == []
