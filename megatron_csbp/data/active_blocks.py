# SPDX-License-Identifier: Apache-2.0
"""Which blocks of a sample need corrupted rows: those in which a row carries loss."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_csbp.objectives.interface import BoolArray, CleanRows, Objective
from megatron_csbp.objectives.noise import SampleNoise
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import Sharding


def active_blocks(
    objective: Objective, sample: Sample, supervised: BoolArray, noises: Sequence[SampleNoise]
) -> BoolArray:
    """Return the blocks of each view in which a row carries loss, bool [V, B].

    The objective itself says so, for the whole sample: nothing else knows where its targets lie.

    Args:
        objective: the training objective.
        sample: documents and views; which blocks it has active does not matter.
        supervised: which positions may be predicted, bool [L].
        noises: noise of each view.
    """
    whole = RankRows(replace(sample, active=None), Sharding())
    here = whole.sample_positions
    marks = np.append(supervised, False)
    same_document = here + 1 < whole.document_stops
    nothing = np.zeros(whole.num_rows, dtype=np.int64)
    clean = CleanRows(
        tokens=nothing,
        next_tokens=nothing,
        supervised=marks[here],
        next_supervised=marks[here + 1] & same_document,
        next_token_supervised=marks[here + 1] & same_document,
    )
    carries = (objective.place(clean, noises, whole).weights != 0) & whole.is_corrupted
    active = np.zeros((sample.num_views, sample.num_blocks), dtype=np.bool_)
    active[whole.copies[carries], here[carries] // sample.block_size] = True
    return active
