# SPDX-License-Identifier: Apache-2.0
"""Jobs of a published model, as the tests of the planner plan them."""

from typing import Any

from megatron_csbp.tools.dry_run.job import Job
from megatron_csbp.tools.dry_run.network import Layer, Network
from megatron_csbp.tools.dry_run.plan import Cluster
from megatron_csbp.tools.dry_run.tables import read_tables
from megatron_csbp.tools.dry_run.topology import Recompute, Topology
from megatron_csbp.transformer.geometry.scheme import BlockAssignment, Scheme

CSBP, CP, BP = Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL, Scheme.CONTEXT_PARALLEL, Scheme.BLOCK_PARALLEL
CLUSTER = Cluster(read_tables(), "h200", 8)


def nemotron(layers: int, hidden: int, ffn: int) -> Network:
    return Network(
        layers=tuple(Layer(number) for number in range(1, layers + 1)),
        hidden=hidden,
        ffn=ffn,
        query_heads=32,
        key_heads=8,
        head_dim=128,
        vocab=131_072,
    )


NEMOTRON_14B, NEMOTRON_3B = nemotron(40, 5120, 16_384), nemotron(26, 3072, 9216)


def job(
    network: Network = NEMOTRON_14B,
    length: int = 262_144,
    context: int = 8,
    scheme: Scheme = CSBP,
    gpus: int = 16,
    assignment: BlockAssignment = BlockAssignment.DUAL_END,
    **more: Any,
) -> Job:
    """Return a job with one sample for each data-parallel rank, as the CSBP paper's."""
    topology = Topology(gpus=gpus, context=context, scheme=scheme, assignment=assignment)
    settings: dict[str, Any] = {
        "block_size": 256,
        "global_batch": topology.data,
        "loss_rows": length // 2,
        "most_loss_rows": length,
        "recompute": Recompute(whole_layers=None),
    }
    return Job(network=network, topology=topology, length=length, **(settings | more))
