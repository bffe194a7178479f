# SPDX-License-Identifier: Apache-2.0
"""Lengths as people write them: 256K is 262,144 tokens. Pure."""

import re
from collections.abc import Sequence

LENGTH_FLAGS = ("--seq-length", "--max-position-embeddings")
"""Flags of Megatron's that take a length."""
_UNITS = {"k": 2**10, "m": 2**20}


def tokens_of(text: str, flag: str = "--seq-length") -> int:
    """Return the tokens of a length such as `262144`, `256K`, `64k` or `1M`.

    Args:
        text: the length.
        flag: whose value it is, for the message.

    Raises:
        ValueError: it is none.
    """
    found = re.fullmatch(r"(\d+)([kKmM]?)", text)
    if found is None or not int(found[1]):
        raise ValueError(f"{flag} {text} must be a number of tokens, such as 262144, 256K or 1M.")
    return int(found[1]) * _UNITS.get(found[2].lower(), 1)


def with_lengths_in_tokens(words: Sequence[str]) -> list[str]:
    """Return a command line in which the values of `LENGTH_FLAGS` are plain numbers, as Megatron reads them.

    Raises:
        ValueError: such a value is no length.
    """
    words, written = list(words), []
    for index, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if equals and flag in LENGTH_FLAGS:
            written.append(f"{flag}={tokens_of(value, flag)}")
        elif index and words[index - 1] in LENGTH_FLAGS:
            written.append(str(tokens_of(word, words[index - 1])))
        else:
            written.append(word)
    return written
