# SPDX-License-Identifier: Apache-2.0
"""A plan as JSON. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from megatron_csbp.tools.dry_run.packed import PackedSamples
from megatron_csbp.tools.dry_run.plan import Plan
from megatron_csbp.tools.dry_run.step_time import ASSUMPTIONS, StepTime
from megatron_csbp.tools.dry_run.sweep import Candidate
from megatron_csbp.tools.dry_run.topology import Topology
from megatron_csbp.tools.dry_run.traffic import StageTraffic


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return a plan; bytes, operations and seconds are plain numbers."""
    job = plan.job
    known = plan.cluster.tables.model_of(job.network)
    return {
        "gpu": plan.cluster.gpu,
        "topology": topology_json(job.topology),
        "fits": plan.fits,
        "parameters": job.network.parameters,
        "active_parameters": job.network.active_parameters,
        "published": None if known is None else {"name": known[0], "parameters": known[1].parameters},
        "tokens": job.length,
        "rows": job.rows,
        "packed_samples": None if job.packed is None else _packed_json(job.packed),
        "tokens_of_an_iteration": job.length * job.global_batch,
        "micro_batches": job.micro_batches,
        "memory": [
            {
                "kind": memory.kind,
                "stage": memory.stage,
                "parameters": memory.parameters,
                "held": dict(memory.held),
                "moments": {name: dict(parts) for name, parts in memory.moments.items()},
                "fullest": memory.fullest,
                "total": memory.total,
                "capacity": memory.capacity,
                "fits": memory.fits,
            }
            for memory in plan.memories
        ],
        "bytes_of_a_layer": {name: asdict(moved) for name, moved in plan.layers.items()},
        "bytes_of_an_iteration": {
            memory.kind: _stage_json(moved) for memory, moved in zip(plan.memories, plan.traffic, strict=True)
        },
        "operations_of_a_sample": asdict(plan.operations) | {"total": plan.operations.total},
        "time": _time_json(plan.time),
    }


def _packed_json(packed: PackedSamples) -> dict[str, Any]:
    return {
        "number": packed.number,
        **{
            name: {
                "documents": len(sample.sample.documents),
                "active_blocks": sample.active,
                "rows": sample.rows,
                "loss_rows": sample.loss_rows,
            }
            for name, sample in (("median", packed.median), ("fullest", packed.fullest))
        },
    }


def _stage_json(moved: StageTraffic) -> dict[str, int]:
    return asdict(moved.layers) | {
        "pipeline": moved.pipeline,
        "gradients": moved.gradients,
        "weights": moved.weights,
        "total": moved.total,
    }


def _time_json(time: StepTime) -> dict[str, Any]:
    return {
        "modelled": True,
        "parts": dict(time.parts),
        "seconds": time.seconds,
        "exposed": time.exposed,
        "mfu": time.mfu,
        "tokens_per_second": time.tokens_per_second,
        "days": time.days,
        "assumptions": list(ASSUMPTIONS),
    }


def topology_json(top: Topology) -> dict[str, Any]:
    """Return sizes and flags of a topology."""
    return (
        asdict(top)
        | {"scheme": str(top.scheme), "assignment": str(top.assignment), "data": top.data}
        | {
            "name": top.name,
            "flags": top.flags(),
        }
    )


def comparison_json(plans: Mapping[str, Plan]) -> dict[str, Any]:
    """Return the plan of each scheme."""
    return {name: plan_json(plan) for name, plan in plans.items()}


def sweep_json(candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    """Return all topologies of a sweep, in their order."""
    return [
        {
            "topology": topology_json(candidate.topology),
            "fits": candidate.plan is not None and not candidate.reason,
            "reason": candidate.reason,
            "bytes": None if candidate.plan is None else candidate.plan.fullest.total,
            "seconds": None if candidate.plan is None else candidate.plan.time.seconds,
        }
        for candidate in candidates
    ]
