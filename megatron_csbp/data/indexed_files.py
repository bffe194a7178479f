# SPDX-License-Identifier: Apache-2.0
"""Megatron's .idx and .bin files, and what preparation writes beside them, as files: what they promise.

Reads headers and sizes, so that a damaged file can be named before Megatron maps it, and tokens within a bound.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt
from megatron.core.datasets.indexed_dataset import DType

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_WINDOW_TOKENS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class PreparedMetadata:
    """What `PREFIX.meta.json` says about a prepared dataset.

    Attributes:
        tokenizer: path or name that the data were prepared with.
        vocab_size: tokens in its vocabulary.
        max_token_id: largest token id in the data.
        tokens: tokens in the data.
        documents: documents in the data.
        supervised_tokens: tokens that are learnt: of answers, completions and plain documents.
        answers_found_by: how answers were told from context, in words; empty for plain documents.
    """

    tokenizer: str
    vocab_size: int
    max_token_id: int
    tokens: int
    documents: int
    supervised_tokens: int
    answers_found_by: list[str]

    def to_json(self) -> str:
        """Return the sidecar's text."""
        return json.dumps(asdict(self), indent=2) + "\n"


@dataclass(frozen=True, eq=False)
class IndexedFiles:
    """The files of one dataset prefix.

    Attributes:
        prefix: path without the suffix.
        dtype: dtype of a token.
        sequence_lengths: tokens in each document, int32 [documents].
        num_tokens: tokens in all documents.
    """

    prefix: str
    dtype: np.dtype[np.generic]
    sequence_lengths: npt.NDArray[np.int32]
    num_tokens: int

    @property
    def num_documents(self) -> int:
        """Documents in the dataset (Megatron splits and shuffles by these)."""
        return len(self.sequence_lengths)

    def token_windows(self, max_tokens: int) -> Iterator[npt.NDArray[np.generic]]:
        """Yield all tokens if there are at most `max_tokens`, else evenly spaced windows of about so many in sum."""
        tokens = np.memmap(bin_path(self.prefix), dtype=self.dtype, mode="r")
        num_windows = -(-min(len(tokens), max_tokens) // _WINDOW_TOKENS)
        for start in np.linspace(0, max(0, len(tokens) - _WINDOW_TOKENS), num_windows).astype(np.int64).tolist():
            yield np.asarray(tokens[start : start + _WINDOW_TOKENS])

    def count(self, token_id: int, max_tokens: int) -> tuple[int, int]:
        """Count how often a token occurs.

        Args:
            token_id: id of the token.
            max_tokens: tokens to read at most, where preparation has not counted all.

        Returns:
            Occurrences, and in how many tokens: all, or those that were read.
        """
        counts = self._counts()
        if counts is not None:
            return int(counts[token_id]) if token_id < len(counts) else 0, self.num_tokens
        found = read = 0
        for window in self.token_windows(max_tokens):
            found += int(np.count_nonzero(window == token_id))
            read += len(window)
        return found, read

    def _counts(self) -> npt.NDArray[np.int64] | None:
        """Return how often each id occurs, or None where that was not counted, or of other data."""
        try:
            counts = np.load(counts_path(self.prefix), allow_pickle=False)
        except (OSError, ValueError):
            return None
        is_table = counts.ndim == 1 and counts.dtype == np.int64
        return counts if is_table and int(counts.sum()) == self.num_tokens else None

    def metadata(self) -> PreparedMetadata | None:
        """Return the sidecar, or None where there is none, it is not ours, or it describes other data."""
        try:
            values = json.loads(meta_path(self.prefix).read_text(encoding="utf-8"))
            metadata = PreparedMetadata(**{field.name: values[field.name] for field in fields(PreparedMetadata)})
        except (OSError, ValueError, KeyError, TypeError):
            return None
        is_current = (metadata.tokens, metadata.documents) == (self.num_tokens, self.num_documents)
        return metadata if is_current else None


def bin_path(prefix: str) -> Path:
    """Return the path of the tokens."""
    return Path(prefix + ".bin")


def idx_path(prefix: str) -> Path:
    """Return the path of the index."""
    return Path(prefix + ".idx")


def counts_path(prefix: str) -> Path:
    """Return the path of the table of how often each token id occurs."""
    return Path(prefix + ".counts.npy")


def meta_path(prefix: str) -> Path:
    """Return the path of the sidecar."""
    return Path(prefix + ".meta.json")


def open_indexed_files(prefix: str, flag: str) -> IndexedFiles:
    """Check that both files of a prefix are there and as long as the index promises.

    Args:
        prefix: path without the suffix.
        flag: the flag that names it, for messages.

    Raises:
        ValueError: a file is missing, is not Megatron's, is truncated, or holds no tokens.
    """
    for path in (idx_path(prefix), bin_path(prefix)):
        if not path.is_file():
            hint = "Give the path without its suffix." if prefix.endswith((".bin", ".idx")) else _PREPARE_HINT
            raise ValueError(f"{flag} {prefix}: the file {path} does not exist. {hint}")
    idx, idx_bytes = idx_path(prefix), idx_path(prefix).stat().st_size
    with idx.open("rb") as stream:
        header = stream.read(_HEADER.size)
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            raise ValueError(f"{flag} {prefix}: {idx} is not a Megatron index. {_PREPARE_HINT}")
        _, version, code, num_sequences, num_document_indices = _HEADER.unpack(header)
        if version != 1 or code not in {dtype.value for dtype in DType}:
            raise ValueError(
                f"{flag} {prefix}: {idx} has version {version} and dtype code {code}; Megatron reads version 1 and "
                f"codes 1 to 8. {_PREPARE_HINT}"
            )
        promised = _HEADER.size + num_sequences * (4 + 8) + num_document_indices * 8
        if idx_bytes < promised:
            raise ValueError(
                f"{flag} {prefix}: {idx} is truncated: {idx_bytes} bytes of {promised} for its {num_sequences} "
                "documents. Copy it again, or prepare the data again."
            )
    lengths = np.zeros(0, np.int32)
    if num_sequences:  # mapped, since every rank of a node looks at indices of hundreds of millions of documents
        lengths = np.memmap(idx, dtype=np.int32, mode="r", offset=_HEADER.size, shape=(num_sequences,))
    dtype = np.dtype(DType.dtype_from_code(code))
    num_tokens = int(lengths.sum(dtype=np.int64))
    _check_bin(prefix, flag, num_tokens, dtype.itemsize)
    return IndexedFiles(prefix, dtype, lengths, num_tokens)


_PREPARE_HINT = "Prepare the data with: python -m megatron_csbp.data.prepare --output-prefix PREFIX ..."


def _check_bin(prefix: str, flag: str, num_tokens: int, itemsize: int) -> None:
    """Check the size of the .bin against what the index promises."""
    path, size = bin_path(prefix), bin_path(prefix).stat().st_size
    if num_tokens == 0:
        raise ValueError(f"{flag} {prefix}: the dataset holds no tokens. {_PREPARE_HINT}")
    if size != num_tokens * itemsize:
        state = "truncated" if size < num_tokens * itemsize else "longer than its index says"
        raise ValueError(
            f"{flag} {prefix}: {path} is {state}: it has {size} bytes, and the index promises {num_tokens} tokens of "
            f"{itemsize} bytes = {num_tokens * itemsize}. Copy both files again, or prepare the data again."
        )
