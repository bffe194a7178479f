# SPDX-License-Identifier: Apache-2.0
"""The mask written out row by row in plain Python, with nothing of the package's own definition: a second opinion.

Shapes: S rows, L positions, V views; whole rows are numbered view by view and then the clean copy, each by position.
"""

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import CLEAN
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask, WindowAnchor

BoolArray = npt.NDArray[np.bool_]


def seen_by(sample: Sample, mask: Mask, copy: int, position: int) -> tuple[range, range]:
    """Return the clean positions that a row sees, and those of its own view."""
    block = sample.block_size
    start = position - position % block
    inside = [(first, stop) for first, stop in sample.documents.tolist() if first <= start < stop]
    if not inside:
        return range(0), range(0)
    ((document, document_stop),) = inside
    stop = min(start + block, document_stop)
    window = math.inf if mask.window is None else mask.window
    if copy == CLEAN:
        last = position + 1 if mask.clean_attention is CleanAttention.TOKEN_CAUSAL else stop
        return range(int(max(document, position - window + 1)), last), range(0)
    anchor = position if mask.anchor is WindowAnchor.POSITION else start
    return range(int(max(document, anchor - window + 1)), start), range(start, stop)


def written_out(sample: Sample, mask: Mask, rows: Iterable[tuple[int, int]]) -> BoolArray:
    """Return who sees whom, bool [S, (V+1) L].

    Args:
        sample: blocks and documents.
        mask: of the layer.
        rows: copy and position of each row.
    """
    given = list(rows)
    length = sample.length
    allowed = np.zeros((len(given), (sample.num_views + 1) * length), dtype=np.bool_)
    for row, (copy, position) in enumerate(given):
        clean, own = seen_by(sample, mask, copy, position)
        allowed[row, sample.num_views * length + np.arange(clean.start, clean.stop)] = True
        allowed[row, max(copy, 0) * length + np.arange(own.start, own.stop)] = True
    return allowed
