# SPDX-License-Identifier: Apache-2.0
"""Megatron's tokenizer and random state at the start of a run: the part of `megatron_compat` that set-up needs.

Its symbols are in `required_symbols.REQUIRED_SYMBOLS`. Nothing here imports Megatron until it is called.
"""

from dataclasses import dataclass
from typing import Any

import torch


def eod_token_id() -> int | None:
    """Return the id that Megatron's tokenizer ends a document with; None if it has none, or none by that name."""
    from megatron.training.global_vars import get_tokenizer

    tokenizer = get_tokenizer()
    try:
        eod = tokenizer.eod
    except (AttributeError, NotImplementedError):
        return None
    return eod if isinstance(eod, int) else None


@dataclass(frozen=True)
class Token:
    """What an id stands for.

    Attributes:
        said: that, in words.
        is_text: it is known to stand for ordinary text, not for a special token.
    """

    said: str
    is_text: bool


def token_of(token_id: int) -> Token:
    """Return what Megatron's tokenizer makes of an id."""
    from megatron.training.global_vars import get_tokenizer

    tokenizer = get_tokenizer()
    size: int = tokenizer.vocab_size
    if token_id >= size:
        return Token(f"no token of the tokenizer, which has {size}", is_text=False)
    if token_id == declared_mask_id():
        return Token(f"{tokenizer.detokenize([token_id])!r}, the mask that the tokenizer declares", is_text=False)
    hugging_face: Any = getattr(getattr(tokenizer, "_tokenizer", None), "tokenizer", None)
    if not hasattr(hugging_face, "added_tokens_decoder"):
        return Token("a token of a tokenizer that does not say which are special", is_text=False)
    text = hugging_face.convert_ids_to_tokens(token_id)
    if text is None:
        return Token("no token of the tokenizer", is_text=False)
    added = hugging_face.added_tokens_decoder.get(token_id)
    if added is not None and added.special:
        return Token(f"{text!r}, a special token", is_text=False)
    return Token(f"{hugging_face.convert_tokens_to_string([text])!r}, an ordinary token", is_text=True)


def declared_mask_id() -> int | None:
    """Return the id that Megatron's tokenizer declares as its mask, or None."""
    from megatron.training.global_vars import get_tokenizer

    tokenizer = get_tokenizer()
    try:
        mask = tokenizer.mask
    except (AttributeError, NotImplementedError, KeyError, IndexError, TypeError):
        return None
    return mask if isinstance(mask, int) and mask >= 0 else None


def vocab_size() -> int:
    """Return how many ids Megatron's tokenizer has; some do not count the end of a document, which comes last."""
    from megatron.training.global_vars import get_tokenizer

    size: int = get_tokenizer().vocab_size
    end = eod_token_id()
    return size if end is None else max(size, end + 1)


def mask_tokens(padded_vocab_size: int) -> tuple[int | None, int | None]:
    """Return ids that could stand for a mask: the tokenizer's own, and the first that it does not have, or None."""
    size = vocab_size()
    return declared_mask_id(), size if size < padded_vocab_size else None


def restart_default_generator() -> None:
    """Seed the default random generators as Megatron did before it warmed its fused functions up.

    Weights outside the tracker of tensor-parallel random states (position embeddings, routers) come from them, and the
    warm-up draws as many numbers as a rank has rows: without this, runs on different numbers of ranks would start
    from different weights.
    """
    from megatron.core import parallel_state as mpu
    from megatron.training import global_vars

    args = global_vars.get_args()
    seed = args.seed + 100 * mpu.get_pipeline_model_parallel_rank()
    if args.data_parallel_random_init:
        seed += 10 * mpu.get_data_parallel_rank()
    torch.manual_seed(seed)
