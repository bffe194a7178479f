# SPDX-License-Identifier: Apache-2.0
"""What one attention layer of one rank costs on an H200, tile by tile: a model, to hold a first measurement against.

Nothing here was measured. Counts follow from the plan; times from the few rates below, which are what published
figures of fused attention on Hopper suggest. Pure: no torch, no Megatron.

Letters: G problems of a tile, T rows, U keys, N query heads, K key/value heads, D head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_csbp.transformer.geometry.layer_plans import rank_rows
from megatron_csbp.transformer.geometry.plan import AttentionPlan, plan_attention
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import Scheme, Sharding
from megatron_csbp.transformer.geometry.tiles import KeySource, MaskKind, Repeats, RowPattern, Tile
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask
from megatron_csbp.transformer.head_groups import default_head_groups

BLOCK = 128
"""Rows and keys that a kernel computes at a time, whether they are there or not."""

_FORWARD_KERNELS, _BACKWARD_KERNELS = 1, 3  # backward: rows' sums before it, the conversion of a gradient after it
_FORWARD_PRODUCTS, _BACKWARD_PRODUCTS = 2, 5  # matrix products, of 2 D operations for each pair and head
_BF16, _FP32 = 2, 4


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How fast a GPU computes attention in bf16. The defaults are an H200's.

    Attributes:
        forward: operations a second of large unmasked tiles in the forward pass; the H200's peak is 989e12.
        backward: the same in the backward pass.
        memory: bytes a second; the H200's peak is 4.8e12.
        launch_seconds: the least that a launch takes: an empty kernel, or the host between two launches.
    """

    forward: float = 600e12
    backward: float = 450e12
    memory: float = 4.0e12
    launch_seconds: float = 5e-6


H200 = Rates()


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Attention heads on one rank: N, K and D."""

    num_query_heads: int
    num_key_value_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass, forward or backward, of a tile.

    Attributes:
        launches: kernels, those that copy, merge and add among them.
        memory_bytes: what copies, merges and additions read and write.
        operations: of the pairs that the mask allows.
        seconds: modelled.
    """

    launches: int
    memory_bytes: int
    operations: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class TileCost:
    """What one tile costs, for all heads of one sequence.

    Attributes:
        tile: the tile.
        forward: forward pass.
        backward: backward pass.
    """

    tile: Tile
    forward: Pass
    backward: Pass


def tile_costs(plan: AttentionPlan, heads: Heads, num_head_groups: int = 1, rates: Rates = H200) -> list[TileCost]:
    """Return the cost of each tile that is computed by a fused kernel of its own, in the order of the plan.

    Args:
        plan: the rank's tiles.
        heads: heads on this rank.
        num_head_groups: groups of heads for which tiles with gathered keys run one after the other.
        rates: of the GPU.
    """
    return [
        _tile_cost(tile, heads, num_head_groups if tile.key_source is KeySource.GATHERED else 1, rates)
        for tile in plan.tiles
    ]


def tile_workspace(tile: Tile, heads: Heads, groups: int = 1) -> int:
    """Return the bytes that the backward pass of a tile allocates, for one sequence.

    Copies of what does not lie in one piece, gradients of queries, keys and values in bf16, and the fp32 sum of query
    gradients that fused kernels keep inside.

    Args:
        tile: the tile.
        heads: heads on the rank.
        groups: groups of heads for which the tile runs one after the other.
    """
    queries = tile.query.num_problems * tile.query.num_rows * heads.num_query_heads * heads.head_dim // groups
    keys = tile.key.num_problems * tile.key.num_rows * heads.num_key_value_heads * heads.head_dim // groups
    copied_rows = _is_copied(tile.query, groups) or tile.folds_heads
    copies = _BF16 * (3 * copied_rows * queries + 2 * _is_copied(tile.key, 1) * keys)
    return copies + _BF16 * (queries + 2 * keys) + _FP32 * queries


def causal_seconds(pairs: int, heads: Heads) -> tuple[float, float]:
    """Return the modelled times of one causal call with so many pairs, forward and backward: the yardstick."""
    blocks = round((2 * pairs) ** 0.5 / BLOCK)
    executed = blocks * (blocks + 1) // 2 * BLOCK * BLOCK * heads.num_query_heads
    return _kernel_seconds(executed, heads.head_dim, H200)


def _kernel_seconds(executed: int, head_dim: int, rates: Rates) -> tuple[float, float]:
    per_product = 2 * head_dim * executed
    return _FORWARD_PRODUCTS * per_product / rates.forward, _BACKWARD_PRODUCTS * per_product / rates.backward


def _tile_cost(tile: Tile, heads: Heads, groups: int, rates: Rates) -> TileCost:
    pairs = tile.num_pairs * heads.num_query_heads
    kernel = _kernel_seconds(_executed_pairs(tile, heads), heads.head_dim, rates)
    problems, rows, keys = tile.query.num_problems, tile.query.num_rows, tile.key.num_rows
    row_elements = problems * rows * heads.num_query_heads * heads.head_dim
    key_elements = problems * keys * heads.num_key_value_heads * heads.head_dim
    is_copied = (_is_copied(tile.query, groups) or tile.folds_heads, _is_copied(tile.key, 1))
    # A copy reads and writes bf16. A merge reads a partial result in bf16 and reads and writes an fp32 one.
    merged = row_elements * (_BF16 + (1 if tile.writes_first else 2) * _FP32)
    added = (row_elements + 2 * key_elements) * (_BF16 + 2 * _FP32)
    copies = [is_copied[0] * row_elements, *(2 * [is_copied[1] * key_elements])]
    back_copies = [*(3 * [is_copied[0] * row_elements]), *copies[1:]]
    return TileCost(
        tile=tile,
        forward=_pass(
            kernel[0], _FORWARD_KERNELS, copies, 2 if tile.writes_first else 1, merged, groups, pairs, heads, rates
        ),
        backward=_pass(kernel[1], _BACKWARD_KERNELS, back_copies, 3, added, groups, pairs, heads, rates),
    )


def _pass(
    kernel_seconds: float,
    kernels: int,
    copied_elements: Sequence[int],
    updates: int,
    updated_bytes: int,
    groups: int,
    pairs: int,
    heads: Heads,
    rates: Rates,
) -> Pass:
    memory_bytes = 2 * _BF16 * sum(copied_elements) + updated_bytes
    launches = groups * (kernels + sum(map(bool, copied_elements)) + updates)
    products = _FORWARD_PRODUCTS if kernels == _FORWARD_KERNELS else _BACKWARD_PRODUCTS
    return Pass(
        launches=launches,
        memory_bytes=memory_bytes,
        operations=products * 2 * heads.head_dim * pairs,
        seconds=max(launches * rates.launch_seconds, kernel_seconds + memory_bytes / rates.memory),
    )


def _executed_pairs(tile: Tile, heads: Heads) -> int:
    """Return the pairs of all heads that kernels compute, in whole blocks of rows and keys."""
    ratio = heads.num_query_heads // heads.num_key_value_heads if tile.folds_heads else 1
    rows, keys = _blocks(tile.query.num_rows * ratio), _blocks(tile.key.num_rows)
    blocks = rows * keys if tile.mask is MaskKind.FULL else rows * (rows + 1) // 2
    return tile.query.num_problems * blocks * BLOCK * BLOCK * (heads.num_query_heads // ratio)


def _blocks(rows: int) -> int:
    return -(-rows // BLOCK)


def _is_copied(pattern: RowPattern, groups: int) -> bool:
    """Return whether a kernel that wants contiguous tensors gets a copy of these rows."""
    return groups > 1 or pattern.starts is not None or not _is_one_run(pattern)


def _is_one_run(pattern: RowPattern) -> bool:
    extent = pattern.length
    nested: Repeats = (*pattern.repeats, *pattern.segments)
    for count, stride in reversed(nested):
        if stride != extent:
            return False
        extent = count * stride
    return True


def format_costs(costs: Sequence[TileCost], heads: Heads, causal_pairs: int) -> list[str]:
    """Return a table with a line for each tile, and the yardstick last, as a Markdown table.

    Args:
        costs: of one rank's tiles.
        heads: heads on the rank.
        causal_pairs: pairs of the causal call that the sum is held against.
    """
    lines = [
        "| tile | G x T x U | launches | MB | GFLOP | forward us | backward us |",
        "|---|---|---|---|---|---|---|",
    ]
    for cost in costs:
        tile = cost.tile
        shape = f"{tile.query.num_problems} x {tile.query.num_rows} x {tile.key.num_rows}"
        lines.append(_line(tile.kind, shape, [cost.forward], [cost.backward]))
    lines.append(_line("all", "", [cost.forward for cost in costs], [cost.backward for cost in costs]))
    forward, backward = (1e6 * seconds for seconds in causal_seconds(causal_pairs, heads))
    return [*lines, f"| one causal call of as many pairs | | | | | {forward:.0f} | {backward:.0f} |"]


def _line(what: str, shape: str, forward: Sequence[Pass], backward: Sequence[Pass]) -> str:
    passes = [*forward, *backward]
    launches = f"{sum(p.launches for p in forward)} + {sum(p.launches for p in backward)}"
    megabytes = sum(p.memory_bytes for p in passes) / 1e6
    gigaoperations = sum(p.operations for p in passes) / 1e9
    times = [1e6 * sum(p.seconds for p in one) for one in (forward, backward)]
    return (
        f"| {what} | {shape} | {launches} | {megabytes:.0f} | {gigaoperations:.1f} | {times[0]:.0f} | {times[1]:.0f} |"
    )


def tile_report(
    length: int, group_size: int, block_size: int, clean_attention: CleanAttention, heads: Heads
) -> list[str]:
    """Return the table of the last rank of a context group under CSBP, with the head groups that training would take.

    Args:
        length: L, clean tokens.
        group_size: P.
        block_size: M.
        clean_attention: mask of the clean copy.
        heads: heads on a rank.
    """
    scheme = Scheme.SINGLE if group_size == 1 else Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL
    rows = rank_rows(Sample(length, block_size), Sharding(group_size, scheme), group_size - 1)
    plan = plan_attention(rows, Mask(clean_attention))
    clean_bytes = length * 2 * heads.num_key_value_heads * heads.head_dim * _BF16 if plan.exchanges else 0
    groups = default_head_groups(heads.num_key_value_heads, clean_bytes, recomputes=False)
    return format_costs(tile_costs(plan, heads, groups), heads, plan.num_pairs)
