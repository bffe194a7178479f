# SPDX-License-Identifier: Apache-2.0
from argparse import Namespace

import pytest

from megatron_csbp.configuration.mask_token_rules import fill_mask_token, good_mask_token


def test_the_tokenizers_own_mask_token_is_the_default() -> None:
    args = Namespace(mask_token_id=None)
    (change,) = fill_mask_token(args, declared=0, spare=None)
    assert args.mask_token_id == 0
    assert (change.name, change.reason) == ("mask_token_id", "the tokenizer's own mask token")


def test_a_mask_token_that_is_given_stays() -> None:
    args = Namespace(mask_token_id=7)
    assert fill_mask_token(args, declared=1, spare=None) == []
    assert args.mask_token_id == 7


def test_where_there_is_none_the_refusal_names_a_spare_row() -> None:
    with pytest.raises(ValueError, match=r"^--mask-token-id is not given.* Use --mask-token-id 188, a spare row"):
        fill_mask_token(Namespace(mask_token_id=None), declared=None, spare=188)


def test_advice_does_not_name_what_was_given() -> None:
    assert "--mask-token-id" not in good_mask_token(5, 5, 5)
    assert good_mask_token(5, None, None).startswith("an id in rows that a larger --make-vocab-size-divisible-by adds")
