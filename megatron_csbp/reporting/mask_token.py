# SPDX-License-Identifier: Apache-2.0
"""What the start summary says of `--mask-token-id`: which token it is, and whether the data have it."""

from argparse import Namespace
from collections.abc import Iterator

import numpy as np
from megatron.core.datasets.object_storage_utils import is_object_storage_path
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_csbp import megatron_start
from megatron_csbp.data.indexed_files import open_indexed_files

_READ_TOKENS = 1 << 22
"""Tokens read of all data together at most."""


def mask_token_lines(args: Namespace) -> list[str]:
    """Return a line that names the token, and a warning if it is one of the data or of ordinary text.

    Args:
        args: Megatron's validated arguments; the tokenizer is built.
    """
    token = megatron_start.token_of(args.mask_token_id)
    lines = [f"  mask token {args.mask_token_id}: {token.said}"]
    found, read = _count_in_data(args)
    reasons = [f"{found} of {read} tokens read of the data have this id"] * bool(found)
    reasons += ["it stands for ordinary text"] * token.is_text
    if reasons:
        declared = megatron_start.declared_mask_id()
        advice = "an id that no text yields, for example in the padding of the vocabulary"
        if declared is not None and declared != args.mask_token_id:
            advice = f"--mask-token-id {declared}, which the tokenizer declares"
        lines.append(
            f"  WARNING: --mask-token-id {args.mask_token_id}: {', and '.join(reasons)}, so the model cannot tell a "
            f"corrupted token from a clean one. Use {advice}."
        )
    return lines


def _count_in_data(args: Namespace) -> tuple[int, int]:
    """Return how many tokens of the data are the mask, and how many were read."""
    prefixes = list(dict.fromkeys(_prefixes(args)))
    found = read = 0
    for prefix in prefixes:
        for window in open_indexed_files(prefix, "--data-path").token_windows(_READ_TOKENS // len(prefixes)):
            found += int(np.count_nonzero(window == args.mask_token_id))
            read += len(window)
    return found, read


def _prefixes(args: Namespace) -> Iterator[str]:
    """Yield the prefixes of all data that are files."""
    if args.mock_data:
        return
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    for prefixes, _ in filter(None, [blend, *(blend_per_split or ())]):
        yield from (prefix for prefix in prefixes if not is_object_storage_path(prefix))
