# SPDX-License-Identifier: Apache-2.0
"""Whether the token that stands for a corrupted one is a token of the data."""

from typing import Any

import numpy as np
from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

from megatron_csbp.data.indexed_files import IndexedFiles

READ_TOKENS = 1 << 22
"""Tokens read of one dataset at most, where preparation has not counted them."""


def check_mask_token_in_data(files: IndexedFiles, source: str, mask_token_id: int, advice: str) -> None:
    """Refuse a mask token that occurs in training data.

    Every rank comes to the same verdict: by the table that preparation wrote, or by the same sample of the data.

    Args:
        files: a dataset.
        source: flag and path of it.
        mask_token_id: `--mask-token-id`.
        advice: how to get a good one.

    Raises:
        ValueError: it occurs.
    """
    found, read = files.count(mask_token_id, READ_TOKENS)
    if found:
        of = f"{read} tokens" if read == files.num_tokens else f"{read} tokens read"
        _refuse(mask_token_id, f"{found} of the {of} of {source} have this id ({found / read:.2g} of all)", advice)


def check_mask_token_in_mock_data(tokenizer: Any, mask_token_id: int, advice: str) -> None:
    """The same of mock data, whose longest document holds every id that any of them holds."""
    documents = MockGPTLowLevelDataset(tokenizer)
    found = np.count_nonzero(documents[int(documents.sequence_lengths.argmax())] == mask_token_id)
    if found:
        _refuse(mask_token_id, "--mock-data, which counts 1, 2, 3, ..., holds this id", advice)


def _refuse(mask_token_id: int, why: str, advice: str) -> None:
    raise ValueError(
        f"--mask-token-id {mask_token_id}: {why}, so that the model could not tell a corrupted token from a clean "
        f"one. Use {advice}."
    )
