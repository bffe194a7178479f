# SPDX-License-Identifier: Apache-2.0
"""What a gated delta net layer costs one rank: parameters, operations, bytes, memory of states. Pure, for planners.

The norm in front of the layer and the MLP behind it are not in these figures. Operations are those of the PyTorch
kernel, which tests hold against PyTorch's own counter; fla computes the same products in tiles of its own, and the
maps of the clean blocks once more.

Letters: P ranks of the context group, C chunk length, M block length, B sequences, H value heads of a tensor-parallel
rank, K key dim, V value dim, X channels of the convolution, R rows that it looks back, T rows of a tile, W = V + K.
"""

from dataclasses import dataclass, fields, replace
from typing import Literal

from megatron_csbp.transformer.delta_net.from_rows import plan_from_rows, whole_sequence
from megatron_csbp.transformer.delta_net.plan import DeltaNetPlan
from megatron_csbp.transformer.delta_net.tiling import fla_state_bytes, tile_length, tiles_of, torch_state_bytes
from megatron_csbp.transformer.delta_net.traffic import DeltaNetSizes, layer_volumes
from megatron_csbp.transformer.geometry.layer_plans import rank_rows
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import Scheme, Sharding
from megatron_csbp.transformer.traffic_ledger import Direction, total


@dataclass(frozen=True)
class LayerFlops:
    """Operations (multiplications and additions) of one rank in a forward pass; backward counts as twice these.

    Attributes:
        projections: the input and the output projection, of the rows of all copies.
        convolution: of the rows of all copies.
        rule: matrix products of the delta rule, of the rows of all copies.
        solves: triangular solves within tiles, those of the maps included.
        maps: matrix products of the affine maps of the rank's clean chunks, and their composition; 0 unless the ranks
            exchange maps.
    """

    projections: int
    convolution: int
    rule: int
    solves: int
    maps: int

    @property
    def total(self) -> int:
        """The sum."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class LayerBytes:
    """Bytes that a rank receives from others for one micro-batch.

    Attributes:
        forward: in the forward pass.
        backward: in the backward pass, the recomputed forward pass included.
    """

    forward: int
    backward: int


@dataclass(frozen=True)
class StateMemory:
    """Memory of the states at block starts on one rank, for one layer and micro-batch.

    Attributes:
        all_bytes: if every block's were alive.
        segments: into how many the bound cuts the rank's chunks; one segment's are alive at a time.
        alive_bytes: of one segment.
        kept_bytes: kept from the forward pass to the backward pass: all states if there is one segment, else the
            states and maps at the starts of segments. Nothing with full recomputation of layers.
    """

    all_bytes: int
    segments: int
    alive_bytes: int
    kept_bytes: int


def layer_parameters(sizes: DeltaNetSizes, hidden_size: int) -> int:
    """Return the parameters of a layer on one tensor-parallel rank, the norm in front of it not counted.

    Args:
        sizes: of the layer, on that rank.
        hidden_size: of the model.
    """
    values = sizes.value_heads * sizes.value_dim
    projections = hidden_size * (sizes.features + values)
    return projections + sizes.channels * (sizes.look_back + 1) + 2 * sizes.value_heads + sizes.value_dim


def layer_bytes(
    rows: RankRows, sizes: DeltaNetSizes, batch: int = 1, *, training: bool = True, recomputed: bool = False
) -> LayerBytes:
    """Return what a rank receives for one layer and micro-batch; the sums of `traffic.layer_volumes`.

    Args:
        rows: the rank's.
        sizes: of the layer, on one tensor-parallel rank.
        batch: B.
        training: whether a backward pass follows.
        recomputed: whether the layer's forward pass is repeated in it.
    """
    volumes = layer_volumes(1, rows, sizes, batch, training=training, recomputed=recomputed)
    forward, backward = (
        total(volume for entry, volume in volumes.items() if entry.direction is direction).remote_bytes
        for direction in (Direction.FORWARD, Direction.BACKWARD)
    )
    return LayerBytes(forward, backward)


def layer_flops(rows: RankRows, sizes: DeltaNetSizes, hidden_size: int, batch: int = 1) -> LayerFlops:
    """Return the operations of a layer's forward pass on one rank.

    Args:
        rows: the rank's.
        sizes: of the layer, on one tensor-parallel rank.
        hidden_size: of the model.
        batch: B.

    Raises:
        ValueError: a corrupted block is not on the rank of its chunk.
    """
    plan, shares = _plan(rows)
    heads = sizes.value_heads // shares * batch
    clean = len(plan.chunks) * plan.chunks[0].length
    blocks = [(plan.step, clean // plan.step)] + [(block.length, 1) for block in plan.blocks]
    rule = sum(count * _rule_flops(length, sizes) for length, count in blocks)
    solves = sum(count * _solve_flops(length, sizes) for length, count in blocks)
    maps = 0
    if plan.exchanges:
        steps, key_dim, value_dim = clean // plan.step, sizes.key_dim, sizes.value_dim
        composed = plan.own_chunks[-1] + 1
        maps = steps * _map_flops(plan.step, sizes) + composed * 2 * key_dim * key_dim * value_dim
        solves += steps * _solve_flops(plan.step, sizes)
    values = sizes.value_heads * sizes.value_dim
    return LayerFlops(
        projections=2 * rows.num_rows * batch * hidden_size * (sizes.features + values),
        convolution=2 * plan.num_rows * batch * sizes.channels // shares * (sizes.look_back + 1),
        rule=heads * rule,
        solves=heads * solves,
        maps=heads * maps,
    )


def flops_of_ranks(
    sample: Sample, sharding: Sharding, sizes: DeltaNetSizes, hidden_size: int, batch: int = 1
) -> tuple[LayerFlops, ...]:
    """Return the operations of a layer's forward pass on every rank of a context group.

    They differ where blocks are inactive: active ones stay with the owner of their chunk, however many it has.

    Args:
        sample: geometry of the sample.
        sharding: how it is spread; active blocks are kept at home whatever it says.
        sizes: of the layer, on one tensor-parallel rank.
        hidden_size: of the model.
        batch: B.
    """
    sharding = replace(sharding, keeps_blocks_home=True)
    ranks = range(sharding.group_size)
    return tuple(layer_flops(rank_rows(sample, sharding, rank), sizes, hidden_size, batch) for rank in ranks)


def _plan(rows: RankRows) -> tuple[DeltaNetPlan, int]:
    """Return what a rank computes, and into how many shares its heads are divided."""
    if rows.sharding.scheme is Scheme.CONTEXT_PARALLEL:
        return whole_sequence(rows)[0], rows.sharding.group_size
    return plan_from_rows(rows), 1


def _rule_flops(length: int, sizes: DeltaNetSizes) -> int:
    """Return the matrix products for a block and head: within tiles, with the state, and of the output."""
    tile = tile_length(length)
    within = 4 * tile * tile * sizes.key_dim  # keys by keys, queries by keys
    state = 4 * tile * sizes.key_dim * sizes.value_dim  # what it erases, what is written to it
    out = 2 * tile * sizes.value_dim * (sizes.key_dim + tile)
    return tiles_of(length) * (within + state + out)


def _map_flops(length: int, sizes: DeltaNetSizes) -> int:
    """Return the same for the affine map of a block: W columns in place of V, and no output."""
    tile = tile_length(length)
    state = 4 * tile * sizes.key_dim * (sizes.value_dim + sizes.key_dim)
    return tiles_of(length) * (4 * tile * tile * sizes.key_dim + state)


def _solve_flops(length: int, sizes: DeltaNetSizes) -> int:
    """Return the operations of a block's triangular solves, with W right-hand sides."""
    tile = tile_length(length)
    return tiles_of(length) * tile * (tile - 1) * (sizes.key_dim + sizes.value_dim)


def state_memory(
    rows: RankRows,
    sizes: DeltaNetSizes,
    bound_bytes: int,
    batch: int = 1,
    kernel: Literal["fla", "torch"] = "fla",
) -> StateMemory:
    """Return the memory of states on a rank, for one layer.

    Args:
        rows: the rank's.
        sizes: of the layer, on one tensor-parallel rank.
        bound_bytes: `--csbp-delta-net-state-mib` in bytes.
        batch: B.
        kernel: which one runs; fla also has the blocks' maps alive.

    Raises:
        ValueError: a corrupted block is not on the rank of its chunk.
    """
    plan, shares = _plan(rows)
    sequences = sizes.value_heads // shares * batch * len(plan.chunks)
    dims = sizes.key_dim, sizes.value_dim
    step_bytes = sequences * (torch_state_bytes(plan.step, *dims) if kernel == "torch" else fla_state_bytes(*dims))
    steps = segment_steps(plan, step_bytes, bound_bytes)
    segments = -(-plan.steps // steps)
    state_bytes = sequences * sizes.key_dim * sizes.value_dim * sizes.state_itemsize
    map_bytes = len(plan.chunks) * batch * sizes.map_bytes if plan.exchanges else 0
    kept = plan.steps * step_bytes if segments == 1 else segments * (state_bytes + map_bytes)
    return StateMemory(plan.steps * state_bytes, segments, steps * step_bytes, kept)


def segment_steps(plan: DeltaNetPlan, step_bytes: int, bound_bytes: int) -> int:
    """Return how many steps of the chunks have their states alive together; at least one.

    Args:
        plan: the rank's.
        step_bytes: bytes of the states of one step of all chunks.
        bound_bytes: bound on what is alive.
    """
    return max(1, min(plan.steps, bound_bytes // step_bytes))
