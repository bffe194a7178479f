# SPDX-License-Identifier: Apache-2.0
"""The demo's text and tokenizer: the longest sources of Python's standard library, and a small BPE trained on them."""

import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np

END_OF_DOCUMENT = "<|endoftext|>"
MASK = "<|mask|>"
"""Stands for a corrupted token. No text contains it, so the tokenizer never yields its id on real data."""

MASK_ID = 1
"""Its id: special tokens come first."""

LONGEST_BYTES = 200_000
"""Longer files of the standard library are tables, not programs."""


def standard_library_documents(total_bytes: int) -> list[Path]:
    """Return the longest sources of this Python's standard library, in the order of their paths.

    Args:
        total_bytes: stop once the files are this long together.

    Raises:
        ValueError: this Python has fewer sources than that.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    sizes = {
        path: path.stat().st_size
        for path in folder.rglob("*.py")
        if not {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"} & set(path.parts)
    }
    chosen: list[Path] = []
    for path, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        if sum(sizes[document] for document in chosen) >= total_bytes:
            return sorted(chosen)
        if size <= LONGEST_BYTES and _is_utf8(path):
            chosen.append(path)
    raise ValueError(
        f"the standard library in {folder} has only {sum(sizes.values())} bytes of Python sources; the demo needs "
        f"{total_bytes}. Use a full installation of Python (Debian: python3-full)."
    )


def build_tokenizer(documents: Sequence[Path], folder: Path, vocab_size: int) -> None:
    """Train a byte-level BPE and save it for `--tokenizer-type HuggingFaceTokenizer`.

    Args:
        documents: UTF-8 text files.
        folder: where to save.
        vocab_size: tokens, the special ones included.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.read_text(encoding="utf-8") for document in documents), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_DOCUMENT, mask_token=MASK)
    fast.save_pretrained(str(folder))
    assert tokenizer.token_to_id(MASK) == MASK_ID


def entropy_of_tokens(prefix: Path) -> float:
    """Return the entropy of the single tokens of an indexed dataset, in nats: the best loss without any context.

    Args:
        prefix: of the dataset's files.
    """
    counts = np.bincount(np.fromfile(prefix.with_suffix(".bin"), dtype=np.uint16))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _is_utf8(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return True
