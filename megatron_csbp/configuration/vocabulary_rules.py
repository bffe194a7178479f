# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's vocabulary may be padded otherwise, and may grow; it may not be another one."""

from argparse import Namespace


def check_padded_vocabulary(args: Namespace, saved: Namespace, source: str) -> list[str]:
    """Compare the rows of the embedding. Megatron loads those that both have and starts further ones at 0.

    Args:
        args: validated arguments.
        saved: the checkpoint's arguments.
        source: how the run came to the checkpoint, for messages.

    Returns:
        What a user should know of rows that are added or dropped.

    Raises:
        ValueError: more rows would be dropped than padding can be.
    """
    before, now = getattr(saved, "padded_vocab_size", None), args.padded_vocab_size
    if before is None or now is None or before == now:
        return []
    if now > before:
        return [f"the embedding grows from {before} to {now} rows: Megatron starts the added ones at 0"]
    most_padding = getattr(saved, "make_vocab_size_divisible_by", 128) * getattr(
        saved, "tensor_model_parallel_size", 1
    )
    if before - now >= most_padding:
        raise ValueError(
            f"the vocabulary has {now} tokens with padding, and {before} in the checkpoint that {source} names, of "
            f"which at most {most_padding - 1} are padding: tokens would be lost. Use the tokenizer of the "
            f"checkpoint, or --make-vocab-size-divisible-by {before}."
        )
    return [f"the embedding shrinks from {before} to {now} rows: padding is dropped"]
