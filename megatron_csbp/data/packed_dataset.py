# SPDX-License-Identifier: Apache-2.0
"""Documents packed into samples, as one of Megatron's datasets: its builder splits, blends and repeats it.

Beside the documents, `PREFIX.loss.bin/.idx` may say which of their tokens carry loss (1) and which do not (0).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split

from megatron_csbp.data.packing import IntArray, Packing, join, pack_epoch

LOSS_SUFFIX = ".loss"
BoolArray = npt.NDArray[np.bool_]


@dataclass
class PackedDatasetConfig(GPTDatasetConfig):
    """Megatron's config of a dataset, with the settings of packing.

    Attributes:
        diffusion_block_size: M; a document starts at a multiple of it.
        loss_on: `answers`, the tokens marked in `PREFIX.loss.bin`, if there is one, or `all`.
        long_documents: `refuse` documents that are longer than a sample, or `cut` them.
    """

    diffusion_block_size: int = 1
    loss_on: str = "answers"
    long_documents: str = "refuse"


class PackedDataset(MegatronDataset):
    """Samples of whole documents, each at a block boundary.

    Every epoch packs all documents anew, in an order that depends on the seed and the epoch alone.

    Its config is a `PackedDatasetConfig`.
    """

    def __init__(
        self,
        dataset: Any,
        dataset_path: str | None,
        indices: npt.NDArray[np.integer[Any]],
        num_samples: int | None,
        index_split: Split,
        config: Any,
    ) -> None:
        """See `MegatronDataset`.

        Raises:
            ValueError: a document is longer than a sample, and `--long-documents` refuses it.
        """
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        self.lengths = self._usable_lengths()
        self.loss_marks = _loss_marks(dataset_path, dataset)
        self.packing = self._pack()

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: IndexedDataset) -> int:
        """Return the number of documents, which splits divide."""
        return len(low_level_dataset.sequence_lengths)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> IndexedDataset:
        """Open the documents."""
        return IndexedDataset(dataset_path, multimodal=False, mmap=config.mmap_bin_files)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.packing)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        """Return a sample's documents: their numbers and where they lie."""
        numbers = self.packing.of_sample(int(idx))
        return {"documents": numbers, "places": self.places(numbers)}

    def places(self, numbers: IntArray) -> IntArray:
        """Return the first position of each of a sample's documents, and the first behind it, int64 [d, 2]."""
        lengths, block = self.lengths[numbers], self.config.diffusion_block_size
        starts = np.concatenate([[0], np.cumsum(-(-lengths // block) * block)[:-1]])
        return np.stack([starts, starts + lengths], axis=1)

    def tokens(self, number: int, first: int, last: int) -> IntArray:
        """Return tokens [first, last) of a document, int64."""
        text = self.dataset.get(int(self.indices[number]), offset=first, length=last - first)
        return np.asarray(text, dtype=np.int64)

    def carries_loss(self, number: int, first: int, last: int) -> BoolArray:
        """Return which tokens [first, last) of a document carry loss."""
        if self.loss_marks is None or self.config.loss_on == "all":
            return np.ones(last - first, dtype=np.bool_)
        marks = self.loss_marks.get(int(self.indices[number]), offset=first, length=last - first)
        return np.asarray(marks, dtype=np.bool_)

    def _usable_lengths(self) -> IntArray:
        """Return the tokens of each document that go into a sample."""
        lengths = np.asarray(self.dataset.sequence_lengths, dtype=np.int64)[self.indices]
        limit = self.config.sequence_length
        if self.config.long_documents == "refuse":
            check_document_lengths(lengths, self.indices, limit, str(self.dataset_path))
        usable: IntArray = np.minimum(lengths, limit)
        return usable

    def _pack(self) -> Packing:
        epochs: list[Packing] = []
        wanted = self.num_samples or 1
        kept = np.flatnonzero(self.lengths > 0)
        if not len(kept):
            raise ValueError(f"{self.dataset_path}: no document with tokens in the {self.index_split.name} split.")
        while sum(map(len, epochs)) < wanted:
            seed = [self.config.random_seed, self.index_split.value, len(epochs)]
            packing = pack_epoch(
                self.lengths[kept],
                self.config.sequence_length,
                self.config.diffusion_block_size,
                np.random.default_rng(seed),
            )
            epochs.append(Packing(kept[packing.documents], packing.offsets))
        return join(epochs)


def check_document_lengths(
    lengths: npt.NDArray[np.integer[Any]], numbers: npt.NDArray[np.integer[Any]], sequence_length: int, source: str
) -> None:
    """Check that no document is longer than a sample.

    Args:
        lengths: tokens of each document, [d].
        numbers: number of each document in its file, [d].
        sequence_length: L.
        source: what the documents are of, for the message.

    Raises:
        ValueError: one is.
    """
    count, longest = int((lengths > sequence_length).sum()), int(lengths.argmax())
    if count:
        raise ValueError(
            f"{source}: {count} of {len(lengths)} documents are longer than --seq-length {sequence_length}; the "
            f"longest, document {int(numbers[longest])}, has {int(lengths[longest])} tokens. Use a longer "
            "--seq-length, or --long-documents cut to train on their beginnings."
        )


def check_loss_marks(
    marks: npt.NDArray[np.integer[Any]], lengths: npt.NDArray[np.integer[Any]], source: str | None
) -> None:
    """Check that there is a mark for each token.

    Args:
        marks: marks of each document, [d].
        lengths: tokens of each document, [d].
        source: prefix of the documents, for the message.

    Raises:
        ValueError: the marks are not of these documents.
    """
    if not np.array_equal(marks, lengths):
        raise ValueError(
            f"{source}{LOSS_SUFFIX}.idx marks other documents than {source}.idx holds. Write a mark for each of its "
            "tokens, or remove the file to train on all of them."
        )


def _loss_marks(dataset_path: str | None, dataset: IndexedDataset) -> IndexedDataset | None:
    """Open the marks beside a dataset; None if there are none."""
    prefix = f"{dataset_path}{LOSS_SUFFIX}"
    if not Path(f"{prefix}.idx").exists():
        return None
    marks = IndexedDataset(prefix, multimodal=False)
    check_loss_marks(marks.sequence_lengths, dataset.sequence_lengths, dataset_path)
    return marks
