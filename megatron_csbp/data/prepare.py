# SPDX-License-Identifier: Apache-2.0
"""Turns text into Megatron's indexed dataset, with a Hugging Face tokenizer.

    python -m megatron_csbp.data.prepare --input FILE_OR_FOLDER ... --tokenizer PATH_OR_NAME --output-prefix PREFIX

Text files are one document each, JSONL files one document a line, folders are searched recursively. Writes PREFIX.bin
and PREFIX.idx for `--data-path PREFIX`, and PREFIX.meta.json, by which training checks the vocabulary at start. The
output appears under its names only when it is complete. Needs no GPU.
"""

import argparse
import multiprocessing
import os
import shutil
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_csbp.data.text_sources import FORMATS, Reading, find_files, read_documents
from megatron_csbp.data.text_tokenizer import TextTokenizer, load_tokenizer

_PROGRESS_SECONDS = 2.0
_BATCH_DOCUMENTS = 256
_BATCH_CHARACTERS = 1 << 20
_BATCHES_PER_WORKER = 3

TokenIds = npt.NDArray[np.int32]

_worker_tokenizer: TextTokenizer | None = None


@dataclass
class _Progress:
    """Counts what is done and says so on stderr every few seconds."""

    num_files: int
    files: int = 0
    documents: int = 0
    empty_documents: int = 0
    tokens: int = 0
    max_token_id: int = -1
    started: float = field(default_factory=time.monotonic)
    said: float = field(default_factory=time.monotonic)

    def add(self, token_ids: TokenIds) -> None:
        """Count a document."""
        if token_ids.size:
            self.documents += 1
            self.tokens += token_ids.size
            self.max_token_id = max(self.max_token_id, int(token_ids.max()))
        else:
            self.empty_documents += 1
        if time.monotonic() - self.said >= _PROGRESS_SECONDS:
            self.say()

    def say(self) -> None:
        """Print one line of progress."""
        self.said = time.monotonic()
        rate = self.tokens / max(self.said - self.started, 1e-9)
        print(
            f"prepare: {self.files}/{self.num_files} files, {self.documents} documents, {self.tokens} tokens, "
            f"{rate:,.0f} tokens/s",
            file=sys.stderr,
            flush=True,
        )


def build_parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_csbp.data.prepare", description="Turn text into Megatron's .bin and .idx files."
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="text files, JSONL files, folders")
    add("--tokenizer", required=True, help="Hugging Face name or folder, or a tokenizer.json file")
    add("--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX.bin, PREFIX.idx and PREFIX.meta.json")
    add("--glob", nargs="+", default=["*"], metavar="PATTERN", help="names of the files to take from folders")
    add("--format", choices=FORMATS, default="auto", help="a document a file, or a line? (default: by name)")
    add("--json-key", default="text", help="key of the text in JSONL files (default: text)")
    add("--append-eod", action="store_true", help="end each document with the tokenizer's end-of-document token")
    add("--eod-token", help="that token, where the tokenizer does not name one")
    add("--skip-undecodable", action="store_true", help="leave out files and JSONL lines that are not UTF-8")
    add("--workers", type=int, default=1, help="processes that tokenize (default: 1)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = build_parser().parse_args(argv)
    try:
        prepare(args)
    except ValueError as error:
        print(f"prepare: error: {error}", file=sys.stderr)
        return 2
    return 0


def prepare(args: argparse.Namespace) -> None:
    """Tokenize the inputs and write the dataset.

    Args:
        args: as parsed by `build_parser`.

    Raises:
        ValueError: an input, the tokenizer or the output cannot be used.
    """
    if args.workers < 1:
        raise ValueError(f"--workers {args.workers} must be at least 1.")
    if args.output_prefix.endswith(os.sep):
        raise ValueError(
            f"--output-prefix {args.output_prefix} is a folder; the prefix is the beginning of the files' names, for "
            f"example {args.output_prefix}train."
        )
    tokenizer = load_tokenizer(args.tokenizer, args.eod_token)
    end = np.array([tokenizer.require_eod_id()] if args.append_eod else [], dtype=np.int32)
    files = find_files(args.input, args.glob)
    progress = _Progress(num_files=len(files))
    with _complete_output(args.output_prefix) as temporary_prefix:
        tokenized = _tokenized(_batches(files, args, progress), tokenizer, args)
        _write(temporary_prefix, _ended(tokenized, end), tokenizer, progress, args)
    progress.say()
    removed = _remove_stale_index_cache(args.output_prefix)
    notes = [f"left out {progress.empty_documents} empty documents"] * bool(progress.empty_documents)
    notes += [f"removed {removed} cached sample indices of older data"] * bool(removed)
    print("; ".join([f"prepare: wrote {args.output_prefix}.bin and .idx", *notes]), file=sys.stderr)


def _write(
    prefix: str,
    documents: Iterable[TokenIds],
    tokenizer: TextTokenizer,
    progress: _Progress,
    args: argparse.Namespace,
) -> None:
    """Write .bin, .idx and the sidecar under a temporary prefix."""
    with warnings.catch_warnings():
        # Megatron warns at import about each optional package that is not installed.
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

        from megatron_csbp.data.indexed_files import PreparedMetadata, bin_path, idx_path, meta_path
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    builder = IndexedDatasetBuilder(str(bin_path(prefix)), dtype=dtype)
    progress.started = time.monotonic()
    for document in documents:
        progress.add(document)
        if document.size:
            builder.add_document(document, [document.size])
    if not progress.tokens:
        raise ValueError(
            f"--input {' '.join(args.input)} holds no text ({progress.num_files} files). Give files with text."
        )
    builder.finalize(str(idx_path(prefix)))
    metadata = PreparedMetadata(
        tokenizer=args.tokenizer,
        vocab_size=tokenizer.vocab_size,
        max_token_id=progress.max_token_id,
        tokens=progress.tokens,
        documents=progress.documents,
    )
    meta_path(prefix).write_text(metadata.to_json(), encoding="utf-8")


def _ended(documents: Iterable[TokenIds], end: TokenIds) -> Iterator[TokenIds]:
    """Append the end token to each document that has text."""
    for document in documents:
        yield np.concatenate([document, end]) if document.size else document


def _batches(files: Iterable[Path], args: argparse.Namespace, progress: _Progress) -> Iterator[list[str]]:
    """Yield the documents of all files in order, in batches of about a megabyte."""
    batch: list[str] = []
    characters = 0
    for path in files:
        for text in read_documents(path, Reading(args.json_key, args.skip_undecodable, args.format)):
            batch.append(text)
            characters += len(text)
            if len(batch) >= _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
        progress.files += 1
    if batch:
        yield batch


def _tokenized(batches: Iterable[list[str]], tokenizer: TextTokenizer, args: argparse.Namespace) -> Iterator[TokenIds]:
    """Yield the token ids of each document, in order. At most a few batches are in memory at once."""
    if args.workers == 1:
        for batch in batches:
            yield from _encode(tokenizer, batch)
        return
    # Spawned, since a forked copy of the tokenizers' thread pool may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.workers, context, _start_worker, (args.tokenizer, args.eod_token)) as pool:
        pending: deque[Future[list[TokenIds]]] = deque()
        try:
            for batch in batches:
                pending.append(pool.submit(_encode_in_worker, batch))
                if len(pending) >= args.workers * _BATCHES_PER_WORKER:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _start_worker(tokenizer: str, eod_token: str | None) -> None:
    """Load the tokenizer once in each worker."""
    global _worker_tokenizer
    _worker_tokenizer = load_tokenizer(tokenizer, eod_token)


def _encode_in_worker(batch: list[str]) -> list[TokenIds]:
    """Encode a batch in a worker."""
    assert _worker_tokenizer is not None
    return _encode(_worker_tokenizer, batch)


def _encode(tokenizer: TextTokenizer, batch: list[str]) -> list[TokenIds]:
    """Return the token ids of each text, int32."""
    return [tokenizer.encode(text) for text in batch]


@contextmanager
def _complete_output(prefix: str) -> Iterator[str]:
    """Yield a temporary prefix beside the output; rename its files when the block succeeds, else remove them."""
    suffixes = (".bin", ".meta.json", ".idx")
    temporary = f"{prefix}.tmp-{os.getpid()}"
    try:
        Path(prefix).parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        for suffix in suffixes:
            os.replace(temporary + suffix, prefix + suffix)
    except OSError as error:
        raise ValueError(f"--output-prefix {prefix} cannot be written: {error}. Choose a writable place.") from error
    finally:
        for suffix in suffixes:
            with suppress(OSError):
                Path(temporary + suffix).unlink()


def _remove_stale_index_cache(prefix: str) -> int:
    """Remove Megatron's cached sample indices of data that had this prefix before; return how many files those were.

    Megatron finds them by path and settings, not by content, and would read the new tokens through the old index.
    """
    cache = Path(prefix) / "cache" / "GPTDataset_indices"
    number = sum(1 for _ in cache.iterdir()) if cache.is_dir() else 0
    shutil.rmtree(cache, ignore_errors=True)
    return number


if __name__ == "__main__":
    sys.exit(main())
