# SPDX-License-Identifier: Apache-2.0
"""Checks the data files before training starts, on every rank and without communication.

Every rank sees the same files and so comes to the same verdict; none is left waiting in a collective for one that
has stopped.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.object_storage_utils import is_object_storage_path
from megatron.core.datasets.utils import Split
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_csbp.data.index_cache import check_index_cache
from megatron_csbp.data.indexed_files import IndexedFiles, open_indexed_files
from megatron_csbp.data.mask_token import check_mask_token_in_data, check_mask_token_in_mock_data
from megatron_csbp.data.packed_dataset import LOSS_SUFFIX, check_document_lengths, check_loss_marks

SCANNED_TOKENS = 1 << 24
"""Tokens read of all datasets of a blend together at most, to find their largest token ids."""
LEAST_SCANNED_TOKENS = 1 << 16
"""Tokens read of one dataset, however many there are."""

Blend = tuple[list[str], list[float] | None]


def validate_data_files(args: Any, tokenizer: Any = None, mask_advice: str = "an id that no text yields") -> None:
    """Check that every data path that the flags name can be trained on.

    Both files exist and have the size that the index promises; every split gets documents; token ids are in the padded
    vocabulary, by the sidecar that preparation wrote, or else by reading up to `SCANNED_TOKENS` tokens of all, evenly
    spaced in larger data (what that misses, the sampler catches as it reads). Data in object storage is not read here.

    Args:
        args: Megatron's validated arguments, with `clean_seq_length` and, for the vocabulary check,
            `padded_vocab_size`.
        tokenizer: Megatron's, of which mock data are made.
        mask_advice: how to get a mask token that the training data do not hold.

    Raises:
        ValueError: a rule is broken; names the flag, the value, the rule and what works.
    """
    blend, blend_per_split = blends(args)
    has_data = blend is not None or blend_per_split is not None
    if args.mock_data:
        if has_data:
            raise ValueError("--mock-data excludes data paths. Leave out --mock-data, or the data paths.")
        if not args.skip_train and tokenizer is not None:
            check_mask_token_in_mock_data(tokenizer, args.mask_token_id, mask_advice)
        return
    if not has_data:
        raise ValueError("no training data: give --data-path PREFIX (without .bin or .idx), or --mock-data.")
    if blend is not None:
        flag = "--data-path" if args.data_args_path is None else "--data-args-path"
        _check_shared_blend(blend, flag, args)
        _check_mask_token(blend, flag, args, mask_advice)
        _check_validation_set(None, args)
        return
    assert blend_per_split is not None
    for split, split_blend in zip(Split, blend_per_split, strict=True):
        if split_blend is not None:
            flag = (
                f"--{split.name}-data-path" if args.per_split_data_args_path is None else "--per-split-data-args-path"
            )
            for files in _open_all(split_blend, flag, args):
                _check_samples(files, flag, split, files.num_tokens, split_blend, args)
            if split is Split.train:
                _check_mask_token(split_blend, flag, args, mask_advice)
    _check_validation_set(blend_per_split, args)


def _check_validation_set(blend_per_split: list[Blend | None] | None, args: Any) -> None:
    """Check that there is a validation set where evaluation is asked for: Megatron fails at its first evaluation."""
    if not args.eval_iters:
        return
    if blend_per_split is not None:
        has_none = blend_per_split[Split.valid.value] is None
        source, remedy = "the data paths of the splits", "--valid-data-path PREFIX"
    else:
        has_none = (
            convert_split_vector_to_split_matrix(parse_and_normalize_split(args.split))[Split.valid.value] is None
        )
        source, remedy = f"--split {args.split}", "--split 99,1,0"
    if has_none:
        raise ValueError(
            f"--eval-iters {args.eval_iters} asks for evaluation, but {source} leaves no validation set. Give one, "
            f"for example {remedy}, or --eval-iters 0."
        )


def blends(args: Any) -> tuple[Blend | None, list[Blend | None] | None]:
    """Return what the data flags name, as Megatron reads them, with its bare assertions put into words."""
    try:
        blend, blend_per_split = get_blend_and_blend_per_split(args)
    except (AssertionError, OSError, KeyError, ValueError) as error:
        raise ValueError(
            f"the data paths cannot be read ({type(error).__name__} {error}). Use one of --data-path, "
            "--data-args-path, --train-data-path with its siblings, or --per-split-data-args-path (a JSON object with "
            "train, valid and test), each with PREFIX ... or with WEIGHT PREFIX WEIGHT PREFIX ..."
        ) from error
    for _, weights in filter(None, [blend, *(blend_per_split or ())]):
        if weights is not None and not all(0.0 < weight < math.inf for weight in weights):
            raise ValueError(
                f"the data blend has weights {weights}: each must be above 0 and finite. "
                "Leave datasets of weight 0 out."
            )
    return blend, blend_per_split


def _split_matrix(split: str | None) -> list[tuple[float, float] | None]:
    """Return the share [first, last) of the documents that each split gets."""
    numbers = [] if split is None else [float(number) for number in re.findall(r"[.0-9]+", split)]
    if not 1 <= len(numbers) <= len(Split) or sum(numbers) <= 0.0:
        raise ValueError(
            f"--split {split} must be one to three numbers, the shares of training, validation and test, with a sum "
            "above 0. Use --split 969,30,1."
        )
    matrix: list[tuple[float, float] | None] = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    return matrix


def _check_shared_blend(blend: Blend, flag: str, args: Any) -> None:
    """Check datasets that are cut into training, validation and test by `--split`."""
    matrix = _split_matrix(args.split)
    for files in _open_all(blend, flag, args):
        for split in Split:
            share = matrix[split.value]
            if share is None:
                continue
            # The same rounding as Megatron's dataset builder, which hangs on a split without documents.
            first, last = (round(bound * files.num_documents) for bound in share)
            if first == last:
                raise ValueError(
                    f"--split {args.split} leaves no document for the {split.name} split of {flag} {files.prefix}, "
                    f"which has {files.num_documents} documents. Give each split a share of at least one document, "
                    f"or 0: for example {_working_split(files.num_documents)}."
                )
            tokens = int(files.sequence_lengths[first:last].sum(dtype=np.int64))
            _check_samples(files, flag, split, tokens, blend, args)


def _working_split(num_documents: int) -> str:
    """Return a split that gives every share at least one document."""
    if num_documents < 3:
        return "--split 100,0,0 --eval-iters 0"
    return "--split 90,5,5" if num_documents >= 20 else f"--split {num_documents - 2},1,1"


def _open_all(blend: Blend, flag: str, args: Any) -> Iterator[IndexedFiles]:
    """Open each dataset and check its token ids and its cached indices."""
    for prefix in blend[0]:
        if is_object_storage_path(prefix):
            if args.pack_documents:
                raise ValueError(
                    f"{flag} {prefix}: --pack-documents reads files, not object storage; copy the data to a file "
                    "system that every rank sees, and give the prefix there."
                )
            continue
        files = open_indexed_files(prefix, flag)
        if args.padded_vocab_size is not None:
            most = max(LEAST_SCANNED_TOKENS, SCANNED_TOKENS // len(blend[0]))
            _check_vocabulary(files, flag, args.padded_vocab_size, most)
        if args.pack_documents:
            _check_packed(files, flag, args)
        else:
            check_index_cache(files, flag, args)
        yield files


def _check_packed(files: IndexedFiles, flag: str, args: Any) -> None:
    """Check documents that are to be packed, and their marks."""
    if args.long_documents == "refuse":
        numbers = np.arange(len(files.sequence_lengths))
        check_document_lengths(files.sequence_lengths, numbers, args.clean_seq_length, f"{flag} {files.prefix}")
    if Path(f"{files.prefix}{LOSS_SUFFIX}.idx").exists():
        marks = open_indexed_files(f"{files.prefix}{LOSS_SUFFIX}", flag)
        check_loss_marks(marks.sequence_lengths, files.sequence_lengths, str(files.prefix))


def _check_mask_token(blend: Blend, flag: str, args: Any, advice: str) -> None:
    """Check that the mask token is not in the training data."""
    if args.skip_train:
        return
    for prefix in blend[0]:
        if not is_object_storage_path(prefix):
            files = open_indexed_files(prefix, flag)
            check_mask_token_in_data(files, f"{flag} {prefix}", args.mask_token_id, advice)


def _check_vocabulary(files: IndexedFiles, flag: str, padded_vocab_size: int, most_tokens: int) -> None:
    """Check that token ids are in the vocabulary, by reading at most so many tokens."""
    metadata = files.metadata()
    if metadata is not None:
        lowest, highest = 0, metadata.max_token_id
        origin = f"prepared with {metadata.tokenizer} of {metadata.vocab_size} tokens"
    else:
        bounds = [(int(window.min()), int(window.max())) for window in files.token_windows(most_tokens)]
        lowest, highest = min(low for low, _ in bounds), max(high for _, high in bounds)
        origin = "found by reading it"
    if lowest < 0 or highest >= padded_vocab_size:
        raise ValueError(
            f"{flag} {files.prefix} holds token id {lowest if lowest < 0 else highest} ({origin}), but the padded "
            f"vocabulary has {padded_vocab_size} tokens (ids 0 to {padded_vocab_size - 1}). Train with the tokenizer "
            "that the data were prepared with (--tokenizer-type, --tokenizer-model, --vocab-size), or prepare the "
            "data again with this one."
        )


def _check_samples(files: IndexedFiles, flag: str, split: Split, tokens: int, blend: Blend, args: Any) -> None:
    """Check that a split has a sample where Megatron does not repeat the data: blends without weights, one epoch."""
    prefixes, weights = blend
    draws_one_epoch = (len(prefixes) > 1 and weights is None) or (split is Split.valid and args.full_validation)
    draws_one_epoch = draws_one_epoch and not args.pack_documents  # where one document makes a sample
    needed = args.clean_seq_length + 1 if draws_one_epoch else 2
    if tokens < needed:
        sample = f"one sample of --seq-length {args.clean_seq_length} and the token after it"
        fix = "a shorter --seq-length, more data, or blend weights, with which small datasets are repeated"
        raise ValueError(
            f"{flag} {files.prefix}: its {split.name} split has {tokens} tokens, and needs at least {needed}"
            + (f" ({sample}). Use {fix}." if draws_one_epoch else " to be repeated. Use more data.")
        )
