# SPDX-License-Identifier: Apache-2.0
"""Wire check: what the network interfaces counted, against the byte ledger, against the closed form.

Shapes: S local rows, N query heads, K key/value heads, D head dim.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.network import Network, read_counters, read_retransmissions
from benchmarks.ranks import RankWorld, run_on_ranks
from benchmarks.stack import BP, CP, CSBP, Shape, Variant, make_context, make_plan
from megatron_csbp.transformer.attention import block_diffusion_attention
from megatron_csbp.transformer.communication import ContextGroupExchange
from megatron_csbp.transformer.geometry.transfers import row_bytes
from megatron_csbp.transformer.traffic_ledger import LayerLedger, TrafficLedger, total

TOLERANCE = 0.01
SETTLE_SECONDS = 0.1
"""Until the last acknowledgement has been counted."""
RESEND_SECONDS = 10
ATTEMPTS = 8
RAW_ELEMENTS = 1_000_000


def measure_wire(sequence_length: int, sizes: tuple[int, ...] = (2, 4)) -> list[dict[str, Any]]:
    """Run one attention layer of every scheme on ranks in namespaces and return what was counted, a row each.

    Args:
        sequence_length: L.
        sizes: context-group sizes P.
    """
    rows: list[dict[str, Any]] = []
    for size in sizes:
        with Network(size, RESEND_SECONDS) as network:
            by_rank = run_on_ranks(_count_all, sequence_length, size, network)
        rows.extend(_summarise(size, list(counts)) for counts in zip(*by_rank, strict=True))
    return rows


def _summarise(size: int, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Add up the ranks; the deviations are those of the worst rank."""
    row: dict[str, Any] = {"ranks": size, "what": ranks[0]["what"]}
    fields = ("formula_bytes", "ledger_bytes", "wire_received_bytes", "wire_sent_bytes", "header_bytes")
    row |= {field: sum(rank[field] for rank in ranks) for field in fields}
    if row["formula_bytes"]:
        row["worst_wire_error"] = max(
            abs(rank[field] / rank["formula_bytes"] - 1)
            for rank in ranks
            for field in ("wire_received_bytes", "wire_sent_bytes")
        )
        row["worst_ledger_error"] = max(abs(rank["ledger_bytes"] / rank["formula_bytes"] - 1) for rank in ranks)
        row["wire_to_formula"] = row["wire_received_bytes"] / row["formula_bytes"]
    return row


def _count_all(world: RankWorld, sequence_length: int) -> list[dict[str, Any]]:
    counts = [_count_raw(world, name) for name in ("all-gather", "all-to-all", "gloo's own reduce-scatter")]
    for variant in (CP, BP, CSBP):
        counts.extend(_count_attention(world, variant, sequence_length))
    return counts


def _count_raw(world: RankWorld, name: str) -> dict[str, Any]:
    """Move a known number of bytes with one collective: the calibration of the counters."""
    small, large = torch.ones(RAW_ELEMENTS), torch.ones(world.size * RAW_ELEMENTS)
    # The old names until torch 2.14, which warns of them.
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    reduce = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
    collective = {
        "all-gather": lambda: gather(large, small, group=world.group),
        "all-to-all": lambda: dist.all_to_all_single(torch.empty_like(large), large, group=world.group),
        "gloo's own reduce-scatter": lambda: reduce(small, large, group=world.group),
    }[name]
    ideal_bytes = (world.size - 1) * small.nbytes

    def run() -> int:
        collective()
        return ideal_bytes

    return {"what": f"raw {name}", "formula_bytes": ideal_bytes, **_counted(world, run)}


def _count_attention(world: RankWorld, variant: Variant, sequence_length: int) -> list[dict[str, Any]]:
    """Count the forward and the backward pass of one attention layer apart."""
    shape = Shape()
    plan = make_plan(variant, shape, sequence_length, world.size, world.rank)
    exchange, ledger = ContextGroupExchange(world.group), TrafficLedger()
    exchange.ledger = LayerLedger(ledger, layer=1)
    context = make_context(plan, shape, exchange, variant)
    heads = (shape.num_heads, shape.num_key_value_heads, shape.num_key_value_heads)
    torch.manual_seed(world.rank)
    query, key, value = (torch.randn(plan.rows.num_rows, 1, n, shape.head_dim, requires_grad=True) for n in heads)
    out_SBND = block_diffusion_attention(query, key, value, context)
    ledger.take()

    def forward() -> int:
        block_diffusion_attention(query, key, value, context)
        return total(ledger.take().values()).remote_bytes

    def backward() -> int:
        out_SBND.backward(torch.ones_like(out_SBND), retain_graph=True)
        return total(ledger.take().values()).remote_bytes

    per_row = row_bytes(shape.num_key_value_heads, shape.head_dim, shape.itemsize)
    unit_bytes = sum(transfer.gather_bytes(per_row) for _, transfer in plan.transfers)
    return [
        {"what": f"{variant.name} forward", "formula_bytes": unit_bytes, **_counted(world, forward)},
        {"what": f"{variant.name} backward", "formula_bytes": 2 * unit_bytes, **_counted(world, backward)},
    ]


def _counted(world: RankWorld, run: Callable[[], int]) -> dict[str, int]:
    """Return what the ledger (the result of `run`) and this rank's interface counted while all ranks ran once.

    TCP sometimes sends a segment twice, on a busy machine more often. That is no traffic of ours: such a run is
    counted again, on all ranks.

    Raises:
        RuntimeError: no run without a retransmission.
    """
    for _ in range(ATTEMPTS):
        dist.barrier(group=world.group)
        time.sleep(SETTLE_SECONDS)
        before, retransmitted = read_counters(), read_retransmissions()
        ledger_bytes = run()
        dist.barrier(group=world.group)
        time.sleep(SETTLE_SECONDS)
        counted = read_counters() - before
        resent = torch.tensor(read_retransmissions() - retransmitted)
        dist.all_reduce(resent, group=world.group)
        if not resent:
            return {
                "ledger_bytes": ledger_bytes,
                "wire_received_bytes": counted.received_payload_bytes,
                "wire_sent_bytes": counted.sent_payload_bytes,
                "header_bytes": counted.received_bytes - counted.received_payload_bytes,
            }
    raise RuntimeError(
        f"TCP sent segments twice in each of {ATTEMPTS} counts; the machine is too busy for a wire check"
    )
