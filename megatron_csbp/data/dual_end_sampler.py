# SPDX-License-Identifier: Apache-2.0
"""The dual-end sampler: reads of each sample only the tokens that a rank's rows need.

Shapes: S local rows of a rank, L clean sequence length.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from megatron.core.datasets.blended_dataset import BlendedDataset

from megatron_csbp.data import gpt_dataset_access as access
from megatron_csbp.objectives.interface import CleanRows
from megatron_csbp.transformer.geometry.needs import merge
from megatron_csbp.transformer.geometry.rows import RankRows

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class _SampleText:
    """The documents, or parts of them, that a sample's tokens are cut from, d of them, in order.

    Attributes:
        documents: document numbers, int [d].
        starts: first token of the sample in each document, int64 [d].
        ends: tokens of the sample up to and with each document, int64 [d].
    """

    documents: IntArray
    starts: IntArray
    ends: IntArray

    @property
    def num_tokens(self) -> int:
        """Tokens that the documents give; positions from there on are padding, whatever token pads them."""
        return int(self.ends[-1])

    def read(self, source: Any, first: int, last: int) -> IntArray:
        """Read tokens first .. last of the sample, 0 where the data have ended, int64 [last - first]."""
        text = np.zeros(last - first, dtype=np.int64)
        position = first
        part = int(np.searchsorted(self.ends, first, side="right"))
        while position < last and part < len(self.ends):
            begin = int(self.ends[part - 1]) if part else 0
            stop = min(last, int(self.ends[part]))
            offset = int(self.starts[part]) + position - begin
            text[position - first : stop - first] = source.get(
                int(self.documents[part]), offset=offset, length=stop - position
            )
            position, part = stop, part + 1
        return text


class DualEndSampler:
    """Reads the rows that one rank of a context group owns, and none else, from Megatron's own datasets.

    With the dual-end assignment a rank's rows lie in chunks r and 2P-1-r of the sample, at its two ends. For each of
    those the sampler reads C + 1 tokens from the indexed dataset (one more, since a row may be asked for its next
    token) where the stock dataset reads, and its loader moves, all L + 1. What comes back equals the same positions
    of the stock sample exactly: tokens, labels and loss mask, with padding and `--eod-mask-loss`. One thing differs:
    padding is what lies behind the last token of the data, where the stock dataset goes by the tokenizer's pad id,
    although that may end each document (Qwen3).

    Which samples make up a batch is not decided here: that stays with Megatron's `build_pretraining_data_loader` and
    its samplers. Hence consumed samples, epochs, schedules of batch sizes and resuming are Megatron's own, and the
    global batch is the same whatever P is: data parallelism does not count the context group, so all its ranks ask for
    the same sample indices.

    Args:
        dataset: Megatron's GPTDataset, MockGPTDataset, or BlendedDataset of them, with L tokens a sample.
        sequence_length: L.
        padded_vocab_size: token ids must be below this.

    Raises:
        ValueError: the dataset is of another kind or has another sequence length.
    """

    def __init__(self, dataset: Any, sequence_length: int, padded_vocab_size: int) -> None:
        self.dataset = dataset
        self.padded_vocab_size = padded_vocab_size
        for part in dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]:
            _check_dataset(part, sequence_length)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.dataset)

    def read(self, sample_index: int, rows: RankRows) -> CleanRows:
        """Return the data under this rank's rows of a sample.

        Args:
            sample_index: index into the dataset.
            rows: the rank's rows.

        Raises:
            ValueError: a token id is not in the vocabulary.
        """
        dataset, index = self.dataset, sample_index
        if isinstance(dataset, BlendedDataset):
            dataset_index, dataset_sample_index = access.blend_indices(dataset)
            index = int(dataset_sample_index[sample_index])
            dataset = dataset.datasets[int(dataset_index[sample_index])]
        sample, reads = _sample_text(dataset, index), _reads(rows)
        text = np.concatenate([sample.read(dataset.dataset, first, last) for first, last in reads.ranges])
        is_padding = np.concatenate([np.arange(first, last) >= sample.num_tokens for first, last in reads.ranges])
        self._check_vocabulary(text, dataset.dataset_path, sample_index)
        is_maskable = np.ones(text.shape, dtype=np.bool_)
        if dataset.config.eod_mask_loss:
            is_maskable = text != dataset.config.tokenizer.eod
        here, following = reads.text_index, reads.text_index + 1
        return CleanRows(
            tokens=text[here],
            next_tokens=text[following],
            supervised=is_maskable[here] & ~is_padding[here] & reads.in_document,
            next_supervised=is_maskable[here] & ~is_padding[following] & reads.next_in_document,
            next_token_supervised=is_maskable[following] & ~is_padding[following] & reads.next_in_document,
        )

    def _check_vocabulary(self, text: IntArray, path: str | None, sample_index: int) -> None:
        """Refuse token ids that the embedding does not have."""
        outside = (text < 0) | (text >= self.padded_vocab_size)
        if outside.any():
            raise ValueError(
                f"--data-path {path}: sample {sample_index} holds token id {int(text[outside][0])}, but the padded "
                f"vocabulary has {self.padded_vocab_size} tokens (ids 0 to {self.padded_vocab_size - 1}). Train with "
                "the tokenizer that the data were prepared with (--tokenizer-type, --tokenizer-model, --vocab-size), "
                "or prepare the data again with this one."
            )


def _check_dataset(dataset: Any, sequence_length: int) -> None:
    """Refuse datasets whose samples are not GPTDataset's, or have another length."""
    if not access.reads_stock_samples(dataset):
        raise ValueError(
            f"dataset {type(dataset).__name__} makes its own samples, which cannot be read in part. Use --data-path "
            "or --mock-data, without --fim-data and --sft."
        )
    if dataset.config.sequence_length != sequence_length:
        raise ValueError(
            f"the dataset has {dataset.config.sequence_length} tokens a sample, but --seq-length is {sequence_length}."
        )
    if dataset.config.eod_mask_loss and dataset.config.tokenizer.eod is None:
        raise ValueError(
            "--eod-mask-loss needs an end-of-document token, and the tokenizer has none. Leave the flag out or use a "
            "tokenizer with an EOS token."
        )


class _Reads:
    """What of a sample a rank's rows need.

    Attributes:
        ranges: token ranges [first, last) with the next token of each row, disjoint and in order.
        text_index: where each row's token lies in the ranges' joined text, int64 [S]; the next lies one further.
        in_document: whether a row is of a document and not of padding between them, bool [S].
        next_in_document: whether its next token is of the same document, bool [S].
    """

    def __init__(self, rows: RankRows) -> None:
        self.ranges = merge((span.start, span.stop + 1) for span in rows.spans)
        firsts = np.array([first for first, _ in self.ranges])
        begins = np.cumsum([0] + [last - first for first, last in self.ranges[:-1]])
        which = np.searchsorted(firsts, rows.sample_positions, side="right") - 1
        self.text_index: IntArray = begins[which] + rows.sample_positions - firsts[which]
        self.in_document = rows.sample_positions < rows.document_stops
        ends = np.where(rows.document_stops == rows.sample.length, rows.sample.length + 1, rows.document_stops)
        self.next_in_document = rows.sample_positions + 1 < ends


@lru_cache(maxsize=2)
def _reads(rows: RankRows) -> _Reads:
    """Return what rows need; most runs have the same rows for every sample."""
    return _Reads(rows)


def _sample_text(dataset: Any, index: int) -> _SampleText:
    """Return where the tokens of a GPTDataset's sample lie."""
    document_index, sample_index, shuffle_index = access.gpt_dataset_indices(dataset)
    row = int(shuffle_index[index])
    (first, first_offset), (last, last_offset) = sample_index[row].tolist(), sample_index[row + 1].tolist()
    documents = document_index[first : last + 1]
    starts = np.zeros(len(documents), dtype=np.int64)
    stops = dataset.dataset.sequence_lengths[documents].astype(np.int64)
    starts[0] = first_offset
    stops[-1] = last_offset + dataset.config.add_extra_token_to_sequence
    return _SampleText(documents, starts, np.cumsum(stops - starts))
