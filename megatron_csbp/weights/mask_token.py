# SPDX-License-Identifier: Apache-2.0
"""Which token id stands for a corrupted token."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_csbp.weights.side_files import has_tokenizer


def find_mask_token(asked: str | None, config: Mapping[str, Any], folder: Path) -> int | None:
    """Return the id of the mask token; None if nothing names one.

    Args:
        asked: an id or a token, from `--mask-token`; without it, the id is that of config.json, or the tokenizer's own
            mask token, or the first behind the tokenizer's tokens, which no text has.
        config: the contents of config.json.
        folder: the model's, with its tokenizer.

    Raises:
        ValueError: the tokenizer does not have that token, or the embedding has no row for it.
    """
    rows = config["vocab_size"]
    if asked is None:
        found = config.get("mask_token_id")
        if found is None and has_tokenizer(folder):
            found = _mask_of_tokenizer(folder)
        return int(found) if found is not None and found < rows else None
    if not asked.isdigit():
        asked = str(_id_of(asked, folder))
    if int(asked) >= rows:
        raise ValueError(
            f"--mask-token {asked} has no row in the embedding, which has {rows}. Name an id below {rows} that no "
            "text has, or "
            "enlarge the embedding with transformers first (resize_token_embeddings)."
        )
    return int(asked)


def _mask_of_tokenizer(folder: Path) -> int:
    # Imported late: a tokenizer is large, and not every import needs one.
    from megatron_csbp.data.text_tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(folder))
    return tokenizer.vocab_size if tokenizer.mask_id is None else tokenizer.mask_id


def _id_of(token: str, folder: Path) -> int:
    if not has_tokenizer(folder):
        raise ValueError(f"--mask-token {token}: {folder} has no tokenizer that knows it; give the token's id.")
    from megatron_csbp.data.text_tokenizer import load_tokenizer

    backend = load_tokenizer(str(folder)).backend
    known = backend.get_vocab()
    if token not in known:
        raise ValueError(
            f"--mask-token {token} is no token of the tokenizer in {folder}; give an id, for example that of an "
            "unused row."
        )
    return int(known[token])
