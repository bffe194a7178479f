# SPDX-License-Identifier: Apache-2.0
"""Writes what preparation makes: tokens, marks of what is learnt, counts of token ids, and the sidecar.

Files appear under their names only when all are complete. Until then they are in the folder PREFIX.partial, which a
later run of preparation clears away if this one is killed.
"""

import fcntl
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from megatron_csbp.data.record_encoder import Encoded, Marks
from megatron_csbp.data.text_pieces import Ids

_NAME = "data"
_SUFFIXES = (".bin", ".loss.bin", ".loss.idx", ".counts.npy", ".meta.json", ".idx")
"""The index comes last: without it there is no dataset."""
_COUNTED_TOGETHER = 1 << 20


class PreparedFiles:
    """Writes documents one by one, in bounded memory but for the length of each.

    Args:
        prefix: path of the files without their endings.
        vocab_size: token ids are below it.
    """

    def __init__(self, prefix: str, vocab_size: int) -> None:
        with warnings.catch_warnings():
            # Megatron warns at import about each optional package that is not installed.
            warnings.simplefilter("ignore")
            from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
        self._prefix = prefix
        self._new_builder = IndexedDatasetBuilder
        self._tokens = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(vocab_size))
        self._marks: Any = None
        self._counts = np.zeros(vocab_size, dtype=np.int64)
        self._uncounted: list[Ids] = []
        self._num_uncounted = 0
        self._lengths: list[int] = []
        self.supervised_tokens = 0
        self.tokens = 0
        self.found_by: dict[str, None] = {}

    @property
    def documents(self) -> int:
        """Documents so far."""
        return len(self._lengths)

    @property
    def max_token_id(self) -> int:
        """The largest id that was counted."""
        self._count()
        return int(np.flatnonzero(self._counts)[-1])

    def count(self, token_id: int) -> int:
        """Return how often a token was written."""
        self._count()
        return int(self._counts[token_id])

    def add(self, document: Encoded) -> None:
        """Write a document, which has tokens."""
        self._tokens.add_document(document.ids, [document.ids.size])
        if document.marks is not None and self._marks is None:
            self._begin_marks()
        marks = np.ones(document.ids.size, np.uint8) if document.marks is None else document.marks
        if self._marks is not None:
            self._mark(marks)
        if document.found_by is not None:
            self.found_by[document.found_by] = None
        self._lengths.append(document.ids.size)
        self.tokens += document.ids.size
        self.supervised_tokens += int(np.count_nonzero(marks))
        self._uncounted.append(document.ids)
        self._num_uncounted += document.ids.size
        if self._num_uncounted >= _COUNTED_TOGETHER:
            self._count()

    def finish(self, tokenizer: str) -> None:
        """Write the index, the counts and the sidecar.

        Args:
            tokenizer: what the tokens were made with.
        """
        from megatron_csbp.data.indexed_files import PreparedMetadata, counts_path, meta_path

        if self._marks is not None:
            self._marks.finalize(f"{self._prefix}.loss.idx")
        self._count()
        np.save(counts_path(self._prefix), self._counts)
        metadata = PreparedMetadata(
            tokenizer=tokenizer,
            vocab_size=len(self._counts),
            max_token_id=self.max_token_id,
            tokens=self.tokens,
            documents=self.documents,
            supervised_tokens=self.supervised_tokens,
            answers_found_by=list(self.found_by),
        )
        meta_path(self._prefix).write_text(metadata.to_json(), encoding="utf-8")
        self._tokens.finalize(f"{self._prefix}.idx")

    def _begin_marks(self) -> None:
        """Mark the documents so far, of which every token is learnt: the first with an answer comes only now."""
        self._marks = self._new_builder(f"{self._prefix}.loss.bin", dtype=np.uint8)
        for length in self._lengths:
            self._mark(np.ones(length, np.uint8))

    def _mark(self, marks: Marks) -> None:
        self._marks.add_document(marks, [marks.size])

    def _count(self) -> None:
        if self._uncounted:
            self._counts += np.bincount(np.concatenate(self._uncounted), minlength=len(self._counts))
            self._uncounted, self._num_uncounted = [], 0


@contextmanager
def whole_output(prefix: str) -> Iterator[str]:
    """Yield a temporary prefix beside the output; name its files when the block succeeds, else remove them.

    Files of an earlier dataset with this prefix stay as they are until then, and leave none of theirs behind.

    Raises:
        ValueError: the place cannot be written, or another process is at it.
    """
    folder = Path(f"{prefix}.partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
        try:
            _hold(lock, prefix)
            for left in folder.iterdir():  # of a run that was killed
                left.unlink()
            try:
                yield str(folder / _NAME)
                _rename(folder, prefix)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
    except OSError as error:
        raise ValueError(f"--output-prefix {prefix} cannot be written: {error}. Choose a writable place.") from error


def _hold(folder: int, prefix: str) -> None:
    """Keep other processes out of an open folder until this one ends, where its file system knows locks."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"--output-prefix {prefix}: another process is preparing data there. Wait for it, or use another prefix."
        ) from None
    except OSError:
        return  # a network file system without locks


def _rename(folder: Path, prefix: str) -> None:
    """Give the files their names: the old index goes first and the new one comes last, so that none is half new."""
    Path(f"{prefix}.idx").unlink(missing_ok=True)
    for suffix in _SUFFIXES:
        written = folder / f"{_NAME}{suffix}"
        if written.exists():
            os.replace(written, prefix + suffix)
        else:
            Path(prefix + suffix).unlink(missing_ok=True)
