# SPDX-License-Identifier: Apache-2.0
"""Which token stands for a corrupted one. Imports nothing of Megatron."""

from argparse import Namespace

from megatron_csbp.configuration.changes import Change, Changes


def check_mask_token(args: Namespace) -> None:
    """A mask id that is given is 0 or more; whether it fits the vocabulary is checked once the tokenizer is there."""
    if args.mask_token_id is not None and args.mask_token_id < 0:
        raise ValueError(f"--mask-token-id {args.mask_token_id} must be at least 0; for example 100.")


def fill_mask_token(args: Namespace, declared: int | None, spare: int | None) -> list[Change]:
    """Take the tokenizer's own mask token where no other is given. Call once the tokenizer is built.

    Args:
        args: validated arguments; changed in place.
        declared: id of the tokenizer's mask token, or None.
        spare: an id of the padded vocabulary that the tokenizer does not have, or None.

    Returns:
        The change, for the start summary.

    Raises:
        ValueError: there is none.
    """
    if args.mask_token_id is not None:
        return []
    if declared is None:
        raise ValueError(
            "--mask-token-id is not given, and the tokenizer declares no mask token: which token id stands for a "
            f"corrupted token? Use {good_mask_token(None, None, spare)}."
        )
    changes = Changes(args)
    changes.set("mask_token_id", declared, "the tokenizer's own mask token")
    return changes.made


def good_mask_token(given: int | None, declared: int | None, spare: int | None) -> str:
    """Say how to get a mask token that no text yields.

    Args:
        given: the id that is not good.
        declared: id of the tokenizer's mask token, or None.
        spare: an id of the padded vocabulary that the tokenizer does not have, or None.
    """
    ways = []
    if declared is not None and declared != given:
        ways.append(f"--mask-token-id {declared}, which the tokenizer declares")
    if spare is not None and spare != given:
        ways.append(f"--mask-token-id {spare}, a spare row of the padded vocabulary")
    elif spare is None:
        ways.append("an id in rows that a larger --make-vocab-size-divisible-by adds")
    ways.append("a tokenizer with a mask token of its own (python -m megatron_csbp.data.train_tokenizer)")
    return ", or ".join(ways)
