# SPDX-License-Identifier: Apache-2.0
"""Packs documents into samples of L positions, each document at a block boundary. Pure: numpy only.

First-fit decreasing within a window of shuffled documents: good fill, and every document still comes at about the time
that the shuffle says. What a window leaves over in samples that are not nearly full goes on to the next window.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

WINDOW = 2048
"""Documents that are packed together."""
_FULL = 0.97
"""A sample with a smaller share of its blocks used waits for the next window."""

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Packing:
    """Which documents make up each sample.

    Attributes:
        documents: document numbers of all samples, one sample after the other, int64.
        offsets: where each sample begins in `documents`, and the end, int64 [n + 1].
    """

    documents: IntArray
    offsets: IntArray

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.offsets) - 1

    def of_sample(self, index: int) -> IntArray:
        """Return the documents of a sample, in the order in which they lie."""
        return self.documents[self.offsets[index] : self.offsets[index + 1]]


def pack_epoch(lengths: IntArray, sequence_length: int, block_size: int, generator: np.random.Generator) -> Packing:
    """Pack every document once.

    Args:
        lengths: tokens of each document, at most `sequence_length`, int64.
        sequence_length: L.
        block_size: M; a document takes whole blocks.
        generator: shuffles documents and the samples of a window.
    """
    blocks = -(-np.asarray(lengths, dtype=np.int64) // block_size)
    capacity = sequence_length // block_size
    assert (blocks <= capacity).all(), "longer documents are cut or refused before"
    order = generator.permutation(len(blocks))
    samples: list[Sequence[int]] = []
    waiting: list[int] = []
    for first in range(0, len(order), WINDOW):
        window = [*waiting, *order[first : first + WINDOW].tolist()]
        packed = list(_first_fit_decreasing(window, blocks, capacity))
        is_last = first + WINDOW >= len(order)
        full = [sample for sample in packed if is_last or blocks[sample].sum() >= _FULL * capacity]
        waiting = [] if is_last else sorted(set(window) - {number for sample in full for number in sample})
        samples.extend(full[index] for index in generator.permutation(len(full)))
    counts = np.array([len(sample) for sample in samples], dtype=np.int64)
    documents = np.array([number for sample in samples for number in sample], dtype=np.int64)
    return Packing(documents, np.concatenate([[0], np.cumsum(counts)]))


@dataclass(frozen=True)
class Fill:
    """How much of the samples is used.

    Attributes:
        samples: number of samples.
        blocks: share of the positions in blocks of documents; the rest is padding of whole blocks.
        tokens: share of the positions that hold a token.
    """

    samples: int
    blocks: float
    tokens: float


def fill_of(packing: Packing, lengths: IntArray, sequence_length: int, block_size: int) -> Fill:
    """Return how well documents fill samples.

    Args:
        packing: from `pack_epoch`.
        lengths: tokens of each document, int64.
        sequence_length: L.
        block_size: M.
    """
    packed, positions = lengths[packing.documents], len(packing) * sequence_length
    blocks = (-(-packed // block_size) * block_size).sum() / positions
    return Fill(len(packing), float(blocks), float(packed.sum() / positions))


def _first_fit_decreasing(window: list[int], blocks: IntArray, capacity: int) -> Iterator[list[int]]:
    """Yield samples: each document, the longest first, goes into the first sample that has room."""
    sizes = blocks[window]
    samples: list[list[int]] = []
    room = np.zeros(len(window), dtype=np.int64)
    for place in np.argsort(-sizes, kind="stable").tolist():
        size = sizes[place]
        fitting = np.flatnonzero(room[: len(samples)] >= size)
        if len(fitting):
            sample = int(fitting[0])
        else:
            sample = len(samples)
            samples.append([])
            room[sample] = capacity
        samples[sample].append(window[place])
        room[sample] -= size
    yield from samples


def join(packings: Sequence[Packing]) -> Packing:
    """Return the samples of several packings, one after the other."""
    offsets, end = [np.zeros(1, dtype=np.int64)], 0
    for packing in packings:
        offsets.append(packing.offsets[1:] + end)
        end += int(packing.offsets[-1])
    return Packing(np.concatenate([packing.documents for packing in packings]), np.concatenate(offsets))
