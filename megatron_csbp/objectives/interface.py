# SPDX-License-Identifier: Apache-2.0
"""What a training objective is: where it puts noise, what each row predicts, what that weighs, what the sum is over.

An objective is one small file. It works on the S local rows of one rank, on the host, in a data worker; its loss is
always a weighted sum of cross-entropies over an integer count, so that ranks and micro-batches simply add up:

    loss = sum over counted rows of weight x CE(logits, target) / sum of num_tokens

Arrays: S local rows of a rank, in its row order; V views.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_csbp.objectives.noise import SampleNoise
from megatron_csbp.objectives.noise_schedules import NoiseSchedule, check_noise_eps, noise_schedule
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.scheme import CLEAN
from megatron_csbp.transformer.geometry.visibility import CleanAttention

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What the flags say about the objective.

    Attributes:
        name: `--diffusion-objective`.
        mask_token_id: `--mask-token-id`.
        noise_schedule: `--noise-schedule`.
        noise_eps: `--noise-eps`, the smallest noise time, in (0, 1].
        diffusion_loss_weight: `--diffusion-loss-weight`; None for the objective's own default.
        ar_loss_weight: `--ar-loss-weight`; None for the objective's own default.
        num_views: `--corrupted-views`; None for the objective's own default.
    """

    name: str
    mask_token_id: int
    noise_schedule: str = "log-linear"
    noise_eps: float = 1e-3
    diffusion_loss_weight: float | None = None
    ar_loss_weight: float | None = None
    num_views: int | None = None

    def __post_init__(self) -> None:
        if self.mask_token_id < 0:
            raise ValueError(f"--mask-token-id {self.mask_token_id} must be a token id, 0 or more.")
        check_noise_eps(self.noise_eps)


@dataclass(frozen=True, eq=False)
class CleanRows:
    """The data under a rank's rows, before any noise. All copies of a position hold the same values.

    Attributes:
        tokens: token at each row's position, int64 [S].
        next_tokens: token at the following position of the sample, which another rank may own, int64 [S].
        supervised: whether the row's token may be predicted: not padding, nor EOD under `--eod-mask-loss`, bool [S].
        next_supervised: Megatron's loss mask: whether the row may be asked for its next token, bool [S].
        next_token_supervised: whether the next token is of the same document and may itself be predicted, bool [S].
    """

    tokens: IntArray
    next_tokens: IntArray
    supervised: BoolArray
    next_supervised: BoolArray
    next_token_supervised: BoolArray


@dataclass(frozen=True, eq=False)
class LossRows:
    """What the model reads and what it is asked for, row by row.

    Attributes:
        tokens: model input, int64 [S].
        targets: token to predict, int64 [S]; of no effect where the weight is 0.
        weights: weight of the row's cross-entropy, float32 [S]; 0 where the row carries no loss on this rank.
        num_tokens: this rank's part of the loss's denominator.
        num_supervised: supervised tokens, masked or not, once for each view; each counts on one rank.
    """

    tokens: IntArray
    targets: IntArray
    weights: npt.NDArray[np.float32]
    num_tokens: int
    num_supervised: int


@dataclass(frozen=True, eq=False)
class LossSums:
    """Sums over one rank's micro-batch: scalar tensors on one device.

    Attributes:
        corrupted_loss: weight x cross-entropy over corrupted rows.
        corrupted_cross_entropy: cross-entropy over corrupted rows that carry loss, whatever their weights.
        clean_loss: weight x cross-entropy over clean rows.
        corrupted_rows: corrupted rows that carry loss.
        clean_rows: clean rows that carry loss.
        num_tokens: sum of `LossRows.num_tokens`.
        num_supervised: sum of `LossRows.num_supervised`.
    """

    corrupted_loss: Tensor
    corrupted_cross_entropy: Tensor
    clean_loss: Tensor
    corrupted_rows: Tensor
    clean_rows: Tensor
    num_tokens: Tensor
    num_supervised: Tensor


Reports = dict[str, tuple[Tensor, Tensor]]
"""Name of a reported loss -> (numerator, denominator) of this micro-batch; Megatron sums both and divides once."""


class Objective(ABC):
    """A training objective: pure, picklable, and the same on every rank.

    Attributes:
        name: value of `--diffusion-objective`.
        default_clean_attention: the clean mask the objective was published with.
        default_diffusion_loss_weight: weight of the diffusion term, unless a flag gives another.
        default_ar_loss_weight: weight of the autoregressive term; 0 for none.
        default_num_views: corrupted copies of a sample, unless a flag gives another number.
        excludes_mask_logit: whether the mask token is taken out of the softmax.
        loss_on_clean_rows: whether any clean row can carry loss, so that its logits are needed.
        config: what the flags say.
        schedule: the noise schedule.
    """

    name: ClassVar[str]
    default_clean_attention: ClassVar[CleanAttention]
    default_diffusion_loss_weight: ClassVar[float]
    default_ar_loss_weight: ClassVar[float]
    default_num_views: ClassVar[int] = 1
    excludes_mask_logit: ClassVar[bool]
    loss_on_clean_rows: bool

    def __init__(self, config: ObjectiveConfig) -> None:
        self.config = config
        self.schedule: NoiseSchedule = noise_schedule(config.noise_schedule)

    @abstractmethod
    def place(self, clean: CleanRows, noises: Sequence[SampleNoise], rows: RankRows) -> LossRows:
        """Corrupt the views of one sample and say what each local row predicts.

        Whether a row is masked is kept as a boolean and never read back from the tokens: a data token equal to the
        mask id is an ordinary token. In evaluation (`SampleNoise.is_evaluation`) the weights may be others than in
        training, for `nelbo`.

        Args:
            clean: the data under the local rows.
            noises: noise of each view of this sample, V of them.
            rows: the rank's rows.
        """

    @abstractmethod
    def reports(self, sums: LossSums, evaluating: bool) -> Reports:
        """Return the losses to log, the first of which is `lm loss`, the quantity that training minimises.

        Args:
            sums: sums of this micro-batch on this rank.
            evaluating: also report `nelbo`, an upper bound on the negative log-likelihood, in nats for each
                supervised token.
        """


def block_values(values: FloatArray, rows: RankRows) -> FloatArray:
    """Spread one value for each diffusion block of each view, float64 [V, L/M], over the local rows, float64 [S].

    Clean rows get the values of view 0.
    """
    return values[np.maximum(rows.copies, 0), rows.sample_positions // rows.sample.block_size]


def masked_rows(
    clean: CleanRows, noises: Sequence[SampleNoise], rows: RankRows, move_chance: FloatArray | float
) -> BoolArray:
    """Draw which rows are masked: supervised corrupted rows, each with its own chance.

    Args:
        clean: the data under the local rows.
        noises: noise of each view of this sample.
        rows: the rank's rows.
        move_chance: chance of each row, float64 [S], or one for all.

    Returns:
        bool [S].
    """
    draws = np.ones(rows.num_rows)
    for span in rows.spans:
        if span.copy != CLEAN:
            draws[span.first_row : span.first_row + span.length] = noises[span.copy].uniforms(span.start, span.length)
    return (draws < move_chance) & clean.supervised & rows.is_corrupted


def num_supervised_tokens(clean: CleanRows, rows: RankRows) -> int:
    """Return this rank's share of the supervised tokens, each once for every view, masked or not.

    Counted on clean rows: a block without a masked token need not have corrupted ones.
    """
    counted = clean.supervised & ~rows.is_corrupted & rows.is_counted
    return rows.sample.num_views * int(np.count_nonzero(counted))


def ratio(numerator: Tensor, denominator: Tensor) -> tuple[Tensor, Tensor]:
    """Return a report entry. A count of 0 becomes 1e-30, which vanishes in any larger sum and gives 0/0 = 0 alone."""
    return numerator, torch.clamp(denominator.to(torch.float32), min=1e-30)
