# SPDX-License-Identifier: Apache-2.0
"""Each backend in bf16 against fp64, for whole context groups: at most twice the error of a dense bf16 computation."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_csbp.tools.gpu_check.settings import Settings
from megatron_csbp.tools.gpu_check.whole_group import dense_attention, group_attention, random_problem
from megatron_csbp.transformer.geometry.scheme import Scheme
from megatron_csbp.transformer.geometry.visibility import CleanAttention
from megatron_csbp.transformer.kernels import AttentionKernel

ALLOWED_RATIO = 2.0


@dataclass(frozen=True)
class Accuracy:
    """One comparison.

    Attributes:
        backend: name of the backend.
        scheme: how the sequence was spread.
        group_size: P.
        head_groups: groups in which the heads were exchanged.
        clean_attention: mask of the clean copy.
        worst_part: the output or gradient with the largest ratio.
        ratio: its error in units of the error of a dense bf16 computation.
        error: its largest absolute error.
    """

    backend: str
    scheme: str
    group_size: int
    head_groups: int
    clean_attention: str
    worst_part: str
    ratio: float
    error: float

    @property
    def passed(self) -> bool:
        """Whether the error is small enough; NaN is not."""
        return self.ratio <= ALLOWED_RATIO


def check_accuracy(kernel: AttentionKernel, settings: Settings) -> Iterator[Accuracy]:
    """Yield one comparison for each mask and each context group, every rank computed in turn.

    Args:
        kernel: the backend.
        settings: sizes.
    """
    cp, csbp, most = Scheme.CONTEXT_PARALLEL, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL, settings.num_head_groups
    groups = [(Scheme.SINGLE, 1, 1), (cp, 2, 1), (cp, 2, most), (Scheme.BLOCK_PARALLEL, 2, 1)]
    groups += [(csbp, size, 1) for size in settings.group_sizes]
    groups += [(csbp, settings.group_sizes[-1], most)]
    problem = random_problem(settings)
    for clean in CleanAttention:
        exact = dense_attention(problem.to(torch.float64), settings.block_size, clean)
        dense = dense_attention(problem, settings.block_size, clean).max_errors(exact)
        for scheme, size, head_groups in groups:
            result = group_attention(problem, scheme, size, settings.block_size, clean, kernel, head_groups)
            errors = result.max_errors(exact)
            ratios = {part: error / dense[part] for part, error in errors.items()}
            # A NaN compares with nothing: it has to be looked for first.
            worst = max(ratios, key=lambda part: (ratios[part] != ratios[part], ratios[part]))
            ratio, error = round(ratios[worst], 3), errors[worst]
            yield Accuracy(kernel.name, str(scheme), size, head_groups, str(clean), worst, ratio, error)
