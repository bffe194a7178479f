# SPDX-License-Identifier: Apache-2.0
"""Objective `nemotron`: NVIDIA's joint loss of Nemotron-Labs-Diffusion (arXiv 2607.05722).

One noise level t for the whole sequence, p = (1 - eps) t + eps; supervised tokens are masked with chance p and predict
themselves; clean rows predict their next token, through token-causal clean attention:

    loss = (w_d sum over masked rows of CE / p + w_a sum over clean rows of CE) / (n_masked + n_AR)

Unlike NVIDIA's code, the autoregressive term honours Megatron's loss mask (padding, EOD under `--eod-mask-loss`).
With w_a = 0 it is left out, of the denominator too.
"""

import math
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
    masked_rows,
    num_supervised_tokens,
    ratio,
)
from megatron_csbp.objectives.noise import SampleNoise
from megatron_csbp.objectives.noise_schedules import noise_times
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.visibility import CleanAttention


class NemotronObjective(Objective):
    """NVIDIA's joint diffusion and autoregressive loss.

    Attributes:
        diffusion_loss_weight: w_d, above 0.
        ar_loss_weight: w_a, 0 or more.

    Raises:
        ValueError: a weight is out of range, or the schedule is not log-linear.
    """

    name: ClassVar[str] = "nemotron"
    default_clean_attention: ClassVar[CleanAttention] = CleanAttention.TOKEN_CAUSAL
    default_diffusion_loss_weight: ClassVar[float] = 0.3
    default_ar_loss_weight: ClassVar[float] = 1.0
    excludes_mask_logit: ClassVar[bool] = False

    def __init__(self, config: ObjectiveConfig) -> None:
        super().__init__(config)
        if config.noise_schedule != "log-linear":
            raise ValueError(
                f"--noise-schedule {config.noise_schedule}: --diffusion-objective {self.name} is defined with "
                "log-linear only. Use --noise-schedule log-linear, or --diffusion-objective block-diffusion."
            )
        diffusion, ar = config.diffusion_loss_weight, config.ar_loss_weight
        self.diffusion_loss_weight = self.default_diffusion_loss_weight if diffusion is None else diffusion
        self.ar_loss_weight = self.default_ar_loss_weight if ar is None else ar
        if not 0.0 < self.diffusion_loss_weight < math.inf:
            raise ValueError(
                f"--diffusion-loss-weight {diffusion} must be a number above 0. "
                f"Use {self.default_diffusion_loss_weight}."
            )
        if not 0.0 <= self.ar_loss_weight < math.inf:
            raise ValueError(f"--ar-loss-weight {ar} must be a number, 0 or more. Use {self.default_ar_loss_weight}.")
        self.loss_on_clean_rows = self.ar_loss_weight > 0.0

    def place(self, clean: CleanRows, noises: Sequence[SampleNoise], rows: RankRows) -> LossRows:
        """See `Objective.place`."""
        levels = np.array([noise.sequence_level() for noise in noises])
        chance = noise_times(levels, self.config.noise_eps)[np.maximum(rows.copies, 0)]
        is_masked = masked_rows(clean, noises, rows, chance)
        is_ar = ~rows.is_corrupted & rows.is_counted & clean.next_supervised & self.loss_on_clean_rows
        weights = np.where(is_masked, self.diffusion_loss_weight / chance, np.where(is_ar, self.ar_loss_weight, 0.0))
        return LossRows(
            tokens=np.where(is_masked, self.config.mask_token_id, clean.tokens),
            targets=np.where(rows.is_corrupted, clean.tokens, clean.next_tokens),
            weights=weights.astype(np.float32),
            num_tokens=int(np.count_nonzero(is_masked) + np.count_nonzero(is_ar)),
            num_supervised=num_supervised_tokens(clean, rows),
        )

    def reports(self, sums: LossSums, evaluating: bool) -> Reports:
        """See `Objective.reports`."""
        diffusion = ratio(sums.corrupted_loss / self.diffusion_loss_weight, sums.num_supervised)
        reports = {
            "lm loss": ratio(sums.corrupted_loss + sums.clean_loss, sums.num_tokens),
            "diffusion loss": diffusion,
        }
        if self.loss_on_clean_rows:
            reports["ar loss"] = ratio(sums.clean_loss / self.ar_loss_weight, sums.clean_rows)
        if evaluating:
            reports["nelbo"] = diffusion
        return reports
