# SPDX-License-Identifier: Apache-2.0
"""Noise schedules of masked diffusion: how likely a token is masked at time t, and what its loss then weighs.

With alpha(t) the chance that a token is still clean, a schedule is its move chance p(t) = 1 - alpha(t), and the NELBO
weighs the loss of a masked token by `w(t) = |alpha'(t)| / (1 - alpha(t)) = p'(t) / p(t)`, which is positive. Then the
mean weight of a token, E[1(masked) w], is the integral of p' over t: 1 for log-linear on any interval of t.

The formulas are BD3-LM's (arXiv 2503.09573) without the small constants that its code adds to p: t never goes below
`--noise-eps`, which keeps w finite, so w is exact here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class NoiseSchedule:
    """A noise schedule.

    Attributes:
        name: value of `--noise-schedule`.
        move_chance: p(t): times in (0, 1], float64 of any shape, to chances in (0, 1].
        weight: w(t) = p'(t) / p(t): times to positive loss weights.
    """

    name: str
    move_chance: Callable[[FloatArray], FloatArray]
    weight: Callable[[FloatArray], FloatArray]


def _power_move_chance(exponent: float, t: FloatArray) -> FloatArray:
    return t**exponent


def _power_weight(exponent: float, t: FloatArray) -> FloatArray:
    return exponent / t


def _power(name: str, exponent: float) -> NoiseSchedule:
    """Return the schedule p = t^e. Partials, not lambdas: data workers may have to unpickle it."""
    return NoiseSchedule(name, partial(_power_move_chance, exponent), partial(_power_weight, exponent))


def _log_move_chance(t: FloatArray) -> FloatArray:
    chance: FloatArray = np.log1p(t) / np.log(2.0)
    return chance


def _log_weight(t: FloatArray) -> FloatArray:
    return 1.0 / ((1.0 + t) * np.log1p(t))


def _cosine_move_chance(t: FloatArray) -> FloatArray:
    # 1 - cos(x) = 2 sin(x/2)^2 without the cancellation at small t.
    return 2.0 * np.sin(np.pi / 4 * t) ** 2


def _cosine_weight(t: FloatArray) -> FloatArray:
    # (pi/2) sin(x) / (1 - cos(x)) = (pi/2) / tan(x/2), with x = pi t / 2.
    return np.pi / 2 / np.tan(np.pi / 4 * t)


NOISE_SCHEDULES: Mapping[str, NoiseSchedule] = MappingProxyType(
    {
        schedule.name: schedule
        for schedule in (
            _power("log-linear", 1.0),
            _power("square", 2.0),
            _power("sqrt", 0.5),
            NoiseSchedule("log", _log_move_chance, _log_weight),
            NoiseSchedule("cosine", _cosine_move_chance, _cosine_weight),
        )
    }
)
"""Every schedule by its value of `--noise-schedule`."""


def noise_schedule(name: str) -> NoiseSchedule:
    """Return the schedule that `--noise-schedule` names.

    Raises:
        ValueError: there is no such schedule.
    """
    if name not in NOISE_SCHEDULES:
        raise ValueError(f"--noise-schedule {name} is not a noise schedule. Use one of: {', '.join(NOISE_SCHEDULES)}.")
    return NOISE_SCHEDULES[name]


def check_noise_eps(eps: float) -> None:
    """Check `--noise-eps`, the smallest time.

    Raises:
        ValueError: it is not in (0, 1]: at time 0 nothing is masked and the weight is infinite.
    """
    if not 0.0 < eps <= 1.0:
        raise ValueError(f"--noise-eps {eps} must be above 0 and at most 1 (the smallest noise time). Use 1e-3.")


def noise_times(levels: FloatArray, eps: float) -> FloatArray:
    """Map levels in [0, 1) to times in [eps, 1): t = level (1 - eps) + eps."""
    return levels * (1.0 - eps) + eps
