# SPDX-License-Identifier: Apache-2.0
"""Turns chats, prompts with completions and plain text into Megatron's indexed dataset, with a Hugging Face tokenizer.

    python -m megatron_csbp.data.prepare --input FILE_OR_FOLDER ... --tokenizer PATH_OR_NAME --output-prefix PREFIX

Text files are one document each; lines of JSON Lines files and rows of Parquet files are a document, a pair or a chat
each; folders are searched recursively. Writes PREFIX.bin and PREFIX.idx for `--data-path PREFIX`; PREFIX.loss.bin and
.idx, which mark answers, unless all is plain text; PREFIX.counts.npy and PREFIX.meta.json, by which training checks
mask token and vocabulary at start. The output appears under its names only when it is complete. Needs no GPU.
"""

import argparse
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from megatron_csbp.data.prepared_files import PreparedFiles, whole_output
from megatron_csbp.data.record_encoder import Encoded, RecordEncoder, Unusable, record_encoder
from megatron_csbp.data.records import Faults, Located, texts_of
from megatron_csbp.data.text_sources import add_reading_arguments, find_files, read_records, reading_from_args

_PROGRESS_SECONDS = 2.0
_BATCH_DOCUMENTS = 256
_BATCH_CHARACTERS = 1 << 20
_BATCHES_PER_WORKER = 3

_Result = list[Encoded | Unusable]

_worker_encoder: RecordEncoder | None = None


@dataclass
class _Progress:
    """Counts what is done and says so on stderr every few seconds."""

    num_files: int
    files: int = 0
    documents: int = 0
    empty_documents: int = 0
    tokens: int = 0
    started: float = field(default_factory=time.monotonic)
    said: float = field(default_factory=time.monotonic)

    def add(self, tokens: int) -> None:
        """Count a document."""
        self.documents += bool(tokens)
        self.empty_documents += not tokens
        self.tokens += tokens
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
        prog="python -m megatron_csbp.data.prepare",
        description="Turn chats, prompts with completions and plain text into Megatron's .bin and .idx files.",
    )
    add_reading_arguments(parser)
    add = parser.add_argument
    add("--tokenizer", required=True, help="Hugging Face name or folder, or a tokenizer.json file")
    add("--chat-template", metavar="FILE", help="a Jinja file, or chatml (default: the tokenizer's own)")
    add(
        "--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX.bin, PREFIX.idx and others beside them"
    )
    add(
        "--append-eod",
        action="store_true",
        help="end documents and completions with the tokenizer's end-of-document token; a chat ends as its template "
        "says",
    )
    add("--eod-token", help="that token, where the tokenizer does not name one")
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
    encoder = record_encoder(args.tokenizer, args.chat_template, args.append_eod, args.eod_token)
    files = find_files(args.input, args.glob)
    progress, faults = _Progress(len(files)), Faults(skips=args.on_error == "skip")
    records = _records(files, args, faults, progress)
    with whole_output(args.output_prefix) as temporary_prefix:
        output = PreparedFiles(temporary_prefix, encoder.tokenizer.vocab_size)
        progress.started = time.monotonic()
        for document in _usable(_encoded(_batches(records), encoder, args), faults):
            progress.add(document.ids.size)
            if document.ids.size:
                output.add(document)
        if not output.tokens:
            raise ValueError(
                f"--input {' '.join(args.input)} holds no text ({len(files)} files). "
                + "; ".join([*faults.lines(), "Give files with text."])
            )
        output.finish(args.tokenizer)
    progress.say()
    notes = [*_notes(args, output, progress, faults), *_mask_note(encoder, output)]
    print("; ".join([f"prepare: wrote {args.output_prefix}.bin and .idx", *notes]), file=sys.stderr)


def _notes(args: argparse.Namespace, output: PreparedFiles, progress: _Progress, faults: Faults) -> list[str]:
    """Return what a user should know of the output."""
    removed = _remove_stale_index_cache(args.output_prefix)
    notes = []
    if output.found_by:
        share = output.supervised_tokens / output.tokens
        notes.append(
            f"{output.supervised_tokens} tokens ({share:.1%}) are learnt, marked in {args.output_prefix}.loss.bin by "
            f"{' and '.join(output.found_by)}"
        )
    notes += [f"left out {progress.empty_documents} empty documents"] * bool(progress.empty_documents)
    notes += faults.lines()
    notes += [f"removed {removed} cached sample indices of older data"] * bool(removed)
    return notes


def _mask_note(encoder: RecordEncoder, output: PreparedFiles) -> list[str]:
    """Say if the tokenizer's own mask token is in the data: training refuses it then."""
    mask_id = encoder.tokenizer.mask_id
    found = 0 if mask_id is None else output.count(mask_id)
    if not found:
        return []
    return [f"the tokenizer's mask token {mask_id} occurs {found} times, so that training cannot use it as the mask"]


def _records(
    files: Iterable[Path], args: argparse.Namespace, faults: Faults, progress: _Progress
) -> Iterator[Located]:
    """Yield the records of all files in order."""
    for path in files:
        yield from read_records(path, reading_from_args(args), faults)
        progress.files += 1


def _usable(results: Iterable[Encoded | Unusable], faults: Faults) -> Iterator[Encoded]:
    """Yield what was encoded; the rest are faults."""
    for result in results:
        if isinstance(result, Unusable):
            faults.add(result.place, result.what)
        else:
            yield result


def _batches(records: Iterable[Located]) -> Iterator[list[Located]]:
    """Yield records in order, in batches of about a megabyte."""
    batch: list[Located] = []
    characters = 0
    for located in records:
        batch.append(located)
        characters += sum(map(len, texts_of(located.record)))
        if len(batch) >= _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encoded(
    batches: Iterable[list[Located]], encoder: RecordEncoder, args: argparse.Namespace
) -> Iterator[Encoded | Unusable]:
    """Yield the tokens of each record, in order. At most a few batches are in memory at once."""
    if args.workers == 1:
        for batch in batches:
            yield from encoder.encode_all(batch)
        return
    # Spawned, since a forked copy of the tokenizers' thread pool may hang.
    context = multiprocessing.get_context("spawn")
    settings = (args.tokenizer, args.chat_template, args.append_eod, args.eod_token)
    with ProcessPoolExecutor(args.workers, context, _start_worker, settings) as pool:
        pending: deque[Future[_Result]] = deque()
        try:
            for batch in batches:
                pending.append(pool.submit(_encode_in_worker, batch))
                if len(pending) >= args.workers * _BATCHES_PER_WORKER:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _start_worker(*settings: object) -> None:
    """Load tokenizer and template once in each worker."""
    global _worker_encoder
    _worker_encoder = record_encoder(*settings)  # type: ignore[arg-type]


def _encode_in_worker(batch: list[Located]) -> _Result:
    """Encode a batch in a worker."""
    assert _worker_encoder is not None
    return _worker_encoder.encode_all(batch)


def _remove_stale_index_cache(prefix: str) -> int:
    """Remove Megatron's cached sample indices of data that had this prefix before; return how many files those were.

    Megatron finds them by path and settings, not by content, and would read the new tokens through the old index.
    """
    cache = Path(prefix) / "cache" / "GPTDataset_indices"
    number = sum(1 for _ in cache.iterdir()) if cache.is_dir() else 0
    shutil.rmtree(cache, ignore_errors=True)
    return number


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing half done stays
    sys.exit(main())
