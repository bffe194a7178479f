# SPDX-License-Identifier: Apache-2.0
"""Objective `block-diffusion`: the NELBO of BD3-LM (arXiv 2503.09573), as the paper's own workloads train it.

One noise time t for each block; a supervised token is masked with chance p(t); a masked token predicts itself, with
weight w(t) = p'(t)/p(t); the mask token is out of the softmax; the sum is divided by all supervised tokens, masked or
not. No loss on the clean copy.
"""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from megatron_csbp.objectives.interface import (
    CleanRows,
    LossRows,
    LossSums,
    Objective,
    ObjectiveConfig,
    Reports,
    block_values,
    masked_rows,
    num_supervised_tokens,
    ratio,
)
from megatron_csbp.objectives.noise import SampleNoise
from megatron_csbp.objectives.noise_schedules import noise_times
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.visibility import CleanAttention


class BlockDiffusionObjective(Objective):
    """BD3-LM's NELBO.

    Raises:
        ValueError: a loss weight is set; there is only one term.
    """

    name: ClassVar[str] = "block-diffusion"
    default_clean_attention: ClassVar[CleanAttention] = CleanAttention.BLOCK_CAUSAL
    default_diffusion_loss_weight: ClassVar[float] = 1.0
    default_ar_loss_weight: ClassVar[float] = 0.0
    excludes_mask_logit: ClassVar[bool] = True
    loss_on_clean_rows = False

    def __init__(self, config: ObjectiveConfig) -> None:
        super().__init__(config)
        if config.ar_loss_weight:
            raise ValueError(
                f"--ar-loss-weight {config.ar_loss_weight}: --diffusion-objective {self.name} has no autoregressive "
                "loss. Use --diffusion-objective nemotron, or leave the flag out."
            )
        if config.diffusion_loss_weight not in (None, 1.0):
            raise ValueError(
                f"--diffusion-loss-weight {config.diffusion_loss_weight}: the loss of --diffusion-objective "
                f"{self.name} has one term, of weight 1. Use --diffusion-objective nemotron, or leave the flag out."
            )

    def place(self, clean: CleanRows, noises: Sequence[SampleNoise], rows: RankRows) -> LossRows:
        """See `Objective.place`."""
        levels = np.stack([noise.block_levels(rows.sample.num_blocks) for noise in noises])
        times = block_values(noise_times(levels, self.config.noise_eps), rows)
        is_masked = masked_rows(clean, noises, rows, self.schedule.move_chance(times))
        weights = np.where(is_masked, self.schedule.weight(times), 0.0)
        num_supervised = num_supervised_tokens(clean, rows)
        return LossRows(
            tokens=np.where(is_masked, self.config.mask_token_id, clean.tokens),
            targets=clean.tokens,
            weights=weights.astype(np.float32),
            num_tokens=num_supervised,
            num_supervised=num_supervised,
        )

    def reports(self, sums: LossSums, evaluating: bool) -> Reports:
        """See `Objective.reports`."""
        reports = {"lm loss": ratio(sums.corrupted_loss, sums.num_tokens)}
        if evaluating:
            reports["nelbo"] = ratio(sums.corrupted_loss, sums.num_supervised)
        return reports
