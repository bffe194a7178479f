# SPDX-License-Identifier: Apache-2.0
"""Training objectives, one file each, behind one interface."""

from collections.abc import Mapping
from types import MappingProxyType

from megatron_csbp.objectives.block_diffusion import BlockDiffusionObjective
from megatron_csbp.objectives.fast_dllm_v2 import FastDllmV2Objective
from megatron_csbp.objectives.interface import (
    CleanRows,
    LossRows,
    LossSums,
    Objective,
    ObjectiveConfig,
    Reports,
)
from megatron_csbp.objectives.nemotron import NemotronObjective

OBJECTIVES: Mapping[str, type[Objective]] = MappingProxyType(
    {objective.name: objective for objective in (BlockDiffusionObjective, NemotronObjective, FastDllmV2Objective)}
)
"""Every objective by its value of `--diffusion-objective`."""


def build_objective(config: ObjectiveConfig) -> Objective:
    """Return the objective that the flags describe.

    Raises:
        ValueError: there is no such objective, or a flag does not fit it.
    """
    if config.name not in OBJECTIVES:
        raise ValueError(
            f"--diffusion-objective {config.name} is not an objective. Use one of: {', '.join(OBJECTIVES)}."
        )
    return OBJECTIVES[config.name](config)


__all__ = [
    "OBJECTIVES",
    "CleanRows",
    "LossRows",
    "LossSums",
    "Objective",
    "ObjectiveConfig",
    "Reports",
    "build_objective",
]
