# SPDX-License-Identifier: Apache-2.0
"""Encodes a long text in pieces, to the same ids as in one piece.

The tokenizers library needs some 150 bytes of memory for each character of a text. So a long text is cut into pieces
that overlap. Where two pieces agree on a run of tokens, what either makes of the text no longer depends on where it
was cut, and the ids of the one are continued with those of the other.

Arrays: n tokens of a piece.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PIECE_CHARACTERS = 1 << 20
OVERLAP_CHARACTERS = 1 << 12
_RUN_TOKENS = 32

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class EncodedPiece:
    """Tokens of a piece of text.

    Attributes:
        ids: token ids, int32 [n].
        spans: first and last-plus-one character of each, in the piece, int64 [n, 2].
    """

    ids: Ids
    spans: npt.NDArray[np.int64]


def encode_in_pieces(
    text: str,
    encode: Callable[[str], EncodedPiece],
    piece_characters: int = PIECE_CHARACTERS,
    overlap_characters: int = OVERLAP_CHARACTERS,
) -> EncodedPiece:
    """Return the tokens of a text, as if it were one piece.

    Args:
        text: the text.
        encode: encodes a piece, without special tokens.
        piece_characters: characters from one piece to the next.
        overlap_characters: characters that a piece shares with the next. Where two pieces do not agree on them
            (megabytes without a word's end, for example), the text is encoded whole.
    """
    ids: list[Ids] = []
    spans: list[npt.NDArray[np.int64]] = []
    piece = encode(text[: piece_characters + overlap_characters])
    used = before = 0
    for start in range(piece_characters, len(text) - overlap_characters, piece_characters):
        following = encode(text[start : start + piece_characters + overlap_characters])
        seam = _seam(piece, following, piece_characters, overlap_characters)
        if seam is None:
            return encode(text)
        ids.append(piece.ids[used : seam[0]])
        spans.append(piece.spans[used : seam[0]] + before)
        piece, used, before = following, seam[1], start
    return EncodedPiece(
        np.concatenate([*ids, piece.ids[used:]]), np.concatenate([*spans, piece.spans[used:] + before])
    )


def _seam(piece: EncodedPiece, following: EncodedPiece, shift: int, overlap: int) -> tuple[int, int] | None:
    """Return the tokens of two overlapping pieces from which on they are the same, in the middle of a common run.

    Args:
        piece: the first piece.
        following: the second, which begins `shift` characters later.
        shift: see there.
        overlap: characters that both have.
    """
    first = int(np.searchsorted(piece.spans[:, 0], shift))
    last = int(np.searchsorted(following.spans[:, 1], overlap, side="right"))
    one = np.column_stack([piece.spans[first:] - shift, piece.ids[first:]])
    other = np.column_stack([following.spans[:last], following.ids[:last]])
    for there in range(len(other) - _RUN_TOKENS + 1):
        here = int(np.searchsorted(one[:, 0], other[there, 0]))
        run = one[here : here + _RUN_TOKENS]
        if len(run) == _RUN_TOKENS and np.array_equal(run, other[there : there + _RUN_TOKENS]):
            middle = _RUN_TOKENS // 2
            return first + here + middle, there + middle
    return None
