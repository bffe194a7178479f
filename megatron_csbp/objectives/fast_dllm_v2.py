# SPDX-License-Identifier: Apache-2.0
"""Objective `fast-dllm-v2`: the published recipe for turning an autoregressive model into a block-diffusion one.

Fast-dLLM v2 (arXiv 2509.26328). Each block has a noise time t ~ U[eps, 1] and masks its supervised tokens with chance
t. Two views complement each other: view 1 masks just the supervised tokens that view 0 does not, so over the pair
every supervised token is scored once. As in the autoregressive model, a row predicts the *next* token: token i is
predicted by row i - 1 of the same view, so the first token of a block by the last row of the block before it. Its mask
is a function of the noise, and no rank asks another. Weights are 1, whatever the noise level:

    loss = sum over both views of the cross-entropy of masked tokens / number of them

In evaluation a masked token also weighs one over its chance to be masked, t in view 0 and 1 - t in view 1: each view
then bounds the negative log-likelihood (docs/objectives.md), and `nelbo` is the mean of both.

The first token of a document has no row that predicts it. Both views share one clean copy, which is block-causal.
"""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from megatron_csbp.objectives.interface import (
    BoolArray,
    CleanRows,
    FloatArray,
    LossRows,
    LossSums,
    Objective,
    ObjectiveConfig,
    Reports,
    ratio,
)
from megatron_csbp.objectives.noise import SampleNoise
from megatron_csbp.objectives.noise_schedules import noise_times
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.visibility import CleanAttention


class FastDllmV2Objective(Objective):
    """Complementary views with shifted targets.

    Raises:
        ValueError: a flag is set that the recipe has no place for.
    """

    name: ClassVar[str] = "fast-dllm-v2"
    default_clean_attention: ClassVar[CleanAttention] = CleanAttention.BLOCK_CAUSAL
    default_diffusion_loss_weight: ClassVar[float] = 1.0
    default_ar_loss_weight: ClassVar[float] = 0.0
    default_num_views: ClassVar[int] = 2
    excludes_mask_logit: ClassVar[bool] = False
    loss_on_clean_rows = False

    def __init__(self, config: ObjectiveConfig) -> None:
        super().__init__(config)
        for flag, value, usual in (
            ("--ar-loss-weight", config.ar_loss_weight, 0.0),
            ("--diffusion-loss-weight", config.diffusion_loss_weight, 1.0),
            ("--noise-schedule", config.noise_schedule, "log-linear"),
            ("--corrupted-views", config.num_views, 2),
        ):
            if value not in (None, usual):
                raise ValueError(
                    f"{flag} {value}: --diffusion-objective {self.name} is defined with {usual} only (two views that "
                    "complement each other, weight 1 for every token). Leave the flag out, or use "
                    "--diffusion-objective block-diffusion."
                )

    def place(self, clean: CleanRows, noises: Sequence[SampleNoise], rows: RankRows) -> LossRows:
        """See `Objective.place`. Both views use the noise of view 0."""
        masked, next_masked, next_chance = self._masks(clean, noises[0], rows)
        has_loss = next_masked & rows.is_corrupted
        weights = has_loss.astype(np.float64)
        if noises[0].is_evaluation:
            np.divide(weights, next_chance, out=weights, where=has_loss)
        num_tokens = int(np.count_nonzero(has_loss))
        return LossRows(
            tokens=np.where(masked & rows.is_corrupted, self.config.mask_token_id, clean.tokens),
            targets=clean.next_tokens,
            weights=weights.astype(np.float32),
            num_tokens=num_tokens,
            num_supervised=num_tokens,
        )

    def _masks(self, clean: CleanRows, noise: SampleNoise, rows: RankRows) -> tuple[BoolArray, BoolArray, FloatArray]:
        """Return whether each row's own token, and its next one, is masked in the row's view, bool [S] each.

        Also the chance of the next one, float64 [S].
        """
        chance = noise_times(noise.block_levels(rows.sample.num_blocks), self.config.noise_eps)
        draws = np.empty((2, rows.num_rows))
        for span in rows.spans:
            uniforms = noise.uniforms(span.start, span.length + 1)
            draws[:, span.first_row : span.first_row + span.length] = uniforms[:-1], uniforms[1:]
        positions, block, last = rows.sample_positions, rows.sample.block_size, rows.sample.num_blocks - 1
        chances = np.stack([chance[positions // block], chance[np.minimum((positions + 1) // block, last)]])
        is_complement = rows.copies == 1
        in_view = np.where(is_complement, draws >= chances, draws < chances)
        next_chance = np.where(is_complement, 1.0 - chances[1], chances[1])
        return in_view[0] & clean.supervised, in_view[1] & clean.next_token_supervised, next_chance

    def reports(self, sums: LossSums, evaluating: bool) -> Reports:
        """See `Objective.reports`."""
        reports = {"lm loss": ratio(sums.corrupted_cross_entropy, sums.num_tokens)}
        if evaluating:
            reports["nelbo"] = ratio(sums.corrupted_loss / 2, sums.num_supervised)
        return reports
