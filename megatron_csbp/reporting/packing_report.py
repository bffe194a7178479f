# SPDX-License-Identifier: Apache-2.0
"""What the start summary says of packed documents: how well they fill samples, and how much of them is learnt."""

from argparse import Namespace

import numpy as np

from megatron_csbp.data.datasets import training_blend
from megatron_csbp.data.indexed_files import IndexedFiles, open_indexed_files
from megatron_csbp.data.packing import fill_of, pack_epoch

_PACKED_DOCUMENTS = 10_000
"""Documents packed to see, at most, which takes about a second."""
_DATASETS = 8


def packing_lines(args: Namespace) -> list[str]:
    """Return a line for each dataset of training, the first few of a large blend.

    Args:
        args: Megatron's validated arguments, with `clean_seq_length`.
    """
    prefixes = dict.fromkeys(training_blend(args)[0])
    files = [open_indexed_files(prefix, "--data-path") for prefix in prefixes]
    lines = [f"  packing: {_fill(of, args)}{_learnt(of, args)}" for of in files[:_DATASETS]]
    return lines + [f"    ... and {len(files) - _DATASETS} more datasets"] * (len(files) > _DATASETS)


def _fill(files: IndexedFiles, args: Namespace) -> str:
    length, block = args.clean_seq_length, args.diffusion_block_size
    number, generator = files.num_documents, np.random.default_rng(args.seed)
    some = np.arange(number)
    if number > _PACKED_DOCUMENTS:
        some = np.sort(generator.choice(number, _PACKED_DOCUMENTS, replace=False))
    lengths = np.minimum(np.asarray(files.sequence_lengths[some], dtype=np.int64), length)
    lengths = lengths[lengths > 0]
    fill = fill_of(pack_epoch(lengths, length, block, generator), lengths, length, block)
    tried = f" (of {len(some)} of them)" if len(some) < number else ""
    return (
        f"{files.prefix}: {number} documents; their blocks fill {fill.blocks:.1%} of the samples{tried}, their tokens "
        f"{fill.tokens:.1%}"
    )


def _learnt(files: IndexedFiles, args: Namespace) -> str:
    metadata = files.metadata()
    if args.loss_on == "all" or metadata is None:
        return ""
    found_by = f" (by {' and '.join(metadata.answers_found_by)})" if metadata.answers_found_by else ""
    return f"; {metadata.supervised_tokens / metadata.tokens:.1%} of the tokens are learnt{found_by}"
