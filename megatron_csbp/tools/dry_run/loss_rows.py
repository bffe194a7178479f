# SPDX-License-Identifier: Apache-2.0
"""How many rows of a sample carry loss."""

from argparse import Namespace

import numpy as np

from megatron_csbp.configuration.objective_flags import objective_from_args
from megatron_csbp.objectives.noise_schedules import noise_times

_GRID = 4096


def loss_rows(args: Namespace, supervised: int) -> tuple[int, int]:
    """Return the rows of a sample that carry loss on average over the noise, and at most.

    Args:
        args: Megatron's validated arguments.
        supervised: tokens of the sample that are learnt.
    """
    objective = objective_from_args(args)
    times = noise_times((np.arange(_GRID) + 0.5) / _GRID, args.noise_eps)
    chance = float(objective.schedule.move_chance(times).mean())
    corrupted = args.corrupted_views * supervised
    clean = supervised * objective.loss_on_clean_rows
    # Two views that complement each other mask every token once.
    most = corrupted // 2 if objective.name == "fast-dllm-v2" else corrupted
    return round(corrupted * chance) + clean, most + clean
