# SPDX-License-Identifier: Apache-2.0
"""Reads of a packed sample only the tokens that a rank's rows need.

Shapes: S local rows of a rank, L clean sequence length.
"""

from typing import Any

import numpy as np
from megatron.core.datasets.blended_dataset import BlendedDataset

from megatron_csbp.data import gpt_dataset_access as access
from megatron_csbp.data.packed_dataset import BoolArray, PackedDataset
from megatron_csbp.data.packing import IntArray
from megatron_csbp.objectives.interface import CleanRows
from megatron_csbp.transformer.geometry.rows import RankRows


class PackedSampler:
    """Reads packed samples.

    Args:
        dataset: a `PackedDataset`, or a blend of them.
        padded_vocab_size: token ids must be below this.
    """

    def __init__(self, dataset: Any, padded_vocab_size: int) -> None:
        self.dataset = dataset
        self.padded_vocab_size = padded_vocab_size

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.dataset)

    def documents(self, sample_index: int) -> IntArray:
        """Return where a sample's documents lie, int64 [d, 2]."""
        dataset, numbers = self._documents(sample_index)
        return dataset.places(numbers)

    def supervised(self, sample_index: int) -> BoolArray:
        """Return which positions of a sample carry loss, bool [L]."""
        dataset, numbers = self._documents(sample_index)
        marks = np.zeros(dataset.config.sequence_length, dtype=np.bool_)
        for number, (start, stop) in zip(numbers.tolist(), dataset.places(numbers).tolist(), strict=True):
            marks[start:stop] = dataset.carries_loss(number, 0, stop - start)
        return marks

    def read(self, sample_index: int, rows: RankRows) -> CleanRows:
        """Return the data under this rank's rows of a sample; padding is token 0.

        Args:
            sample_index: index into the dataset.
            rows: the rank's rows of this sample.

        Raises:
            ValueError: a token id is not in the vocabulary.
        """
        dataset, numbers = self._documents(sample_index)
        # One position more than the sample has, for the next token of its last.
        tokens = np.zeros(rows.sample.length + 1, dtype=np.int64)
        marks = np.zeros(rows.sample.length + 1, dtype=np.bool_)
        within = np.zeros(rows.sample.length + 1, dtype=np.bool_)
        starts_here = np.zeros(rows.sample.length + 1, dtype=np.bool_)
        needed = np.zeros(rows.sample.length + 1, dtype=np.bool_)
        needed[rows.sample_positions] = needed[rows.sample_positions + 1] = True
        for number, (start, stop) in zip(numbers.tolist(), dataset.places(numbers).tolist(), strict=True):
            starts_here[start] = True
            used = np.flatnonzero(needed[start:stop])
            if len(used):
                first, last = int(used[0]), int(used[-1]) + 1
                tokens[start + first : start + last] = dataset.tokens(number, first, last)
                marks[start + first : start + last] = dataset.carries_loss(number, first, last)
                within[start:stop] = True
        self._check_vocabulary(tokens, dataset.dataset_path, sample_index)
        here, following = rows.sample_positions, rows.sample_positions + 1
        next_is_predicted = marks[following] & within[following] & ~starts_here[following]
        return CleanRows(
            tokens=tokens[here],
            next_tokens=tokens[following],
            supervised=marks[here],
            next_supervised=next_is_predicted & within[here],
            next_token_supervised=next_is_predicted,
        )

    def _documents(self, sample_index: int) -> tuple[PackedDataset, IntArray]:
        dataset, index = self.dataset, sample_index
        if isinstance(dataset, BlendedDataset):
            dataset_index, dataset_sample_index = access.blend_indices(dataset)
            index = int(dataset_sample_index[sample_index])
            dataset = dataset.datasets[int(dataset_index[sample_index])]
        return dataset, dataset.packing.of_sample(index)

    def _check_vocabulary(self, text: IntArray, path: str | None, sample_index: int) -> None:
        outside = (text < 0) | (text >= self.padded_vocab_size)
        if outside.any():
            raise ValueError(
                f"--data-path {path}: sample {sample_index} holds token id {int(text[outside][0])}, but the padded "
                f"vocabulary has {self.padded_vocab_size} tokens (ids 0 to {self.padded_vocab_size - 1}). Train with "
                "the tokenizer that the data were prepared with (--tokenizer-type, --tokenizer-model, --vocab-size), "
                "or prepare the data again with this one."
            )
