# SPDX-License-Identifier: Apache-2.0
"""The full-size model of one rank of each kind, on meta tensors: shapes without memory, on ranks that do not exist."""

from argparse import Namespace
from typing import Any

from megatron_csbp import megatron_planning
from megatron_csbp.tools.attention_step import fake_group
from megatron_csbp.tools.dry_run.job import Job
from megatron_csbp.tools.dry_run.network import Parameters


def built_parameters(args: Namespace, config: Any, job: Job) -> dict[int, Parameters]:
    """Build a rank of each kind of pipeline stage as training would, and return its parameters, by stage.

    Args:
        args: validated arguments.
        config: Megatron's config of the model; its transformer config is changed in place.
        job: what they describe.
    """
    found: dict[int, Parameters] = {}
    top = job.topology
    for stage in job.stage_kinds().values():
        rank = stage * (top.gpus // top.pipeline)
        with fake_group(top.gpus, rank), megatron_planning.parallel_state(args) as groups:
            total = Parameters()
            for chunk in range(top.virtual):
                number = chunk if top.virtual > 1 else None
                total += _counted(megatron_planning.build_without_values(config, groups, stage, number))
            found[stage] = total
    return found


def _counted(model: Any) -> Parameters:
    """Count each tensor once; Megatron marks those of experts as not summed over the data-parallel group."""
    dense = experts = 0
    for parameter in model.parameters():
        if getattr(parameter, "allreduce", True):
            dense += parameter.numel()
        else:
            experts += parameter.numel()
    return Parameters(dense, experts)


def check_built(built: dict[int, Parameters], job: Job) -> None:
    """Hold the closed form, on which memory and time rest, against the built model.

    Raises:
        ValueError: they differ: the planner has no model of some part of this network.
    """
    for stage, found in built.items():
        expected = job.stage_parameters(stage)
        if expected.total != found.total:
            raise ValueError(
                f"this network is not planned: pipeline stage {stage} has {found.total} parameters where the "
                f"planner's formula has {expected.total}, so the planner does not know a part of it; check the job "
                f"alone with --csbp-dry-run {job.topology.gpus}."
            )
