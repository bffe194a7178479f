# SPDX-License-Identifier: Apache-2.0
"""Trains a byte-level BPE on text, with the two special tokens that block diffusion needs.

    python -m megatron_csbp.data.train_tokenizer --input FILE_OR_FOLDER ... --vocab-size V --output FOLDER

The first token of the vocabulary ends a document, the second is the mask, which no text yields. FOLDER is for
`--tokenizer` of preparation, and for `--tokenizer-type HuggingFaceTokenizer --tokenizer-model` of training. The
`tokenizers` library trains it.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from megatron_csbp.data.chat_templates import CHATML, CHATML_TEMPLATE, CHATML_TOKENS
from megatron_csbp.data.records import Faults, texts_of
from megatron_csbp.data.text_pieces import PIECE_CHARACTERS
from megatron_csbp.data.text_sources import add_reading_arguments, find_files, read_records, reading_from_args

END_TOKEN = "<|endoftext|>"
MASK_TOKEN = "<|mask|>"
_BYTES = 256


def build_parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_csbp.data.train_tokenizer",
        description="Train a byte-level BPE with an end-of-document and a mask token.",
    )
    add_reading_arguments(parser)
    add = parser.add_argument
    add("--vocab-size", type=int, required=True, metavar="V", help="tokens, the special ones included")
    add("--output", required=True, metavar="FOLDER", help="folder of the tokenizer, which is made")
    add("--end-token", default=END_TOKEN, help=f"end of a document (default: {END_TOKEN})")
    add("--mask-token", default=MASK_TOKEN, help=f"stands for a corrupted token (default: {MASK_TOKEN})")
    add(
        "--chat-template",
        choices=[CHATML],
        help=f"also give it this template for chats, and the tokens {' and '.join(CHATML_TOKENS)}",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = build_parser().parse_args(argv)
    try:
        files = find_files(args.input, args.glob)
        faults = Faults(skips=args.on_error == "skip")
        reading = reading_from_args(args)
        records = (located.record for path in files for located in read_records(path, reading, faults))
        texts = (text for record in records for text in texts_of(record))
        size, mask_id = train_tokenizer(
            texts, Path(args.output), args.vocab_size, args.end_token, args.mask_token, args.chat_template is not None
        )
    except ValueError as error:
        print(f"train_tokenizer: error: {error}", file=sys.stderr)
        return 2
    note = "" if size == args.vocab_size else f" (the text is too short for --vocab-size {args.vocab_size})"
    print(
        f"train_tokenizer: wrote {args.output}: {size} tokens{note}, the mask {args.mask_token} ({mask_id}) among "
        f"them. Train with --tokenizer-type HuggingFaceTokenizer --tokenizer-model {args.output}"
        + "".join(f"; {line}" for line in faults.lines()),
        file=sys.stderr,
    )
    return 0


def train_tokenizer(
    texts: Iterable[str],
    folder: Path,
    vocab_size: int,
    end_token: str = END_TOKEN,
    mask_token: str = MASK_TOKEN,
    for_chats: bool = False,
) -> tuple[int, int]:
    """Train a tokenizer and save it.

    Args:
        texts: documents.
        folder: where to save.
        vocab_size: tokens, the special ones included.
        end_token: ends a document.
        mask_token: stands for a corrupted token; no document may hold it.
        for_chats: whether it gets ChatML's template and tokens.

    Returns:
        Number of tokens, which is smaller than `vocab_size` if the text is short; id of the mask.

    Raises:
        ValueError: the size or a token cannot be used, there is no text, or the folder cannot be written.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = [end_token, mask_token, *(CHATML_TOKENS if for_chats else ())]
    if vocab_size < _BYTES + len(special):
        raise ValueError(
            f"--vocab-size {vocab_size} must be at least {_BYTES + len(special)}: all bytes and {len(special)} "
            "special tokens. Use 32768."
        )
    if not end_token or not mask_token or end_token == mask_token:
        raise ValueError(
            f"--end-token {end_token!r} and --mask-token {mask_token!r} must be two different texts, for example "
            f"{END_TOKEN} and {MASK_TOKEN}."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_pieces(texts, mask_token), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end_token, mask_token=mask_token)
    if for_chats:
        fast.chat_template = CHATML_TEMPLATE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fast.save_pretrained(str(folder))
    except OSError as error:
        raise ValueError(f"--output {folder} cannot be written: {error}. Choose a writable place.") from error
    mask_token_id = tokenizer.token_to_id(mask_token)
    assert mask_token_id is not None, "it was given to the trainer"
    return tokenizer.get_vocab_size(), mask_token_id


def _pieces(texts: Iterable[str], mask_token: str) -> Iterator[str]:
    """Yield the texts, long ones in pieces, which the library needs less memory for.

    Raises:
        ValueError: there is no text, or one holds the mask token.
    """
    empty = True
    for text in texts:
        if mask_token in text:
            raise ValueError(
                f"--mask-token {mask_token}: a document holds this text, which would become the mask in the data. "
                "Name another, which no document holds, for example --mask-token '<|diffusion_mask|>'."
            )
        empty = empty and not text
        yield from (text[start : start + PIECE_CHARACTERS] for start in range(0, len(text), PIECE_CHARACTERS))
    if empty:
        raise ValueError("--input holds no text. Give files with text.")


if __name__ == "__main__":
    sys.exit(main())
