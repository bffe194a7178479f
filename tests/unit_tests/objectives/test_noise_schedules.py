# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from megatron_csbp.objectives.noise_schedules import NOISE_SCHEDULES, check_noise_eps, noise_schedule, noise_times

TIMES = np.linspace(1e-3, 1.0, 4001)


@pytest.mark.parametrize("name", NOISE_SCHEDULES)
def test_the_move_chance_rises_to_certainty(name: str) -> None:
    chance = noise_schedule(name).move_chance(TIMES)
    assert np.all(np.diff(chance) > 0.0)
    assert chance[0] > 0.0
    assert chance[-1] == pytest.approx(1.0, abs=1e-15)
    assert np.all(chance <= 1.0)


@pytest.mark.parametrize("name", NOISE_SCHEDULES)
def test_the_weight_is_the_positive_nelbo_weight(name: str) -> None:
    schedule, step = noise_schedule(name), 1e-6
    times = TIMES[1:-1]
    slope = (schedule.move_chance(times + step) - schedule.move_chance(times - step)) / (2 * step)
    weight = schedule.weight(times)
    assert np.all(weight > 0.0)
    np.testing.assert_allclose(weight, slope / schedule.move_chance(times), rtol=2e-6)


def test_log_linear_is_t_and_one_over_t() -> None:
    schedule = noise_schedule("log-linear")
    np.testing.assert_array_equal(schedule.move_chance(TIMES), TIMES)
    np.testing.assert_array_equal(schedule.weight(TIMES), 1.0 / TIMES)


def test_the_schedules_are_those_of_bd3lm() -> None:
    assert list(NOISE_SCHEDULES) == ["log-linear", "square", "sqrt", "log", "cosine"]
    half = np.array([0.5])
    chances = [float(NOISE_SCHEDULES[name].move_chance(half)[0]) for name in NOISE_SCHEDULES]
    assert chances == pytest.approx([0.5, 0.25, 2**-0.5, np.log(1.5) / np.log(2), 1 - np.cos(np.pi / 4)])


def test_times_run_from_eps_to_one() -> None:
    np.testing.assert_allclose(noise_times(np.array([0.0, 0.5, 1.0]), 0.2), [0.2, 0.6, 1.0])
    assert noise_times(np.array(0.3), 1.0) == 1.0


def test_an_unknown_schedule_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"--noise-schedule linear is not .* log-linear, square, sqrt, log, cosine"):
        noise_schedule("linear")


@pytest.mark.parametrize("eps", [0.0, -1.0, 1.5, float("nan")])
def test_an_eps_outside_its_range_is_refused(eps: float) -> None:
    with pytest.raises(ValueError, match=rf"--noise-eps {eps} must be above 0 and at most 1 .* Use 1e-3"):
        check_noise_eps(eps)
