# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron_csbp.tools.plan_report`: what a run would hold, move and compute, from the real planner.

Nothing runs and nothing is measured: rows, bytes, operations and balance come from the attention plan
that training uses. With `--dry-run` the exchange itself is started on empty tensors, and what its collectives carry is
compared with the plan. Units: bytes and operations of one rank, for one training step of one sequence (forward,
backward, all layers).
"""

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

from megatron_csbp.reporting.attention_model import Heads, tile_report
from megatron_csbp.tools.flops import ModelShape, assignment_speedup, attention_work
from megatron_csbp.transformer.geometry.layer_plans import rank_rows
from megatron_csbp.transformer.geometry.plan import AttentionPlan, plan_attention
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import Scheme, Sharding
from megatron_csbp.transformer.geometry.transfers import row_bytes
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask

_NEMOTRON = ModelShape(
    num_layers=26,
    hidden_size=3072,
    ffn_hidden_size=9216,
    num_query_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=131072,
)
MODELS = {
    "nemotron-3b": _NEMOTRON,
    "nemotron-8b": replace(_NEMOTRON, num_layers=34, hidden_size=4096, ffn_hidden_size=14336),
    "nemotron-14b": replace(_NEMOTRON, num_layers=40, hidden_size=5120, ffn_hidden_size=16384),
}
"""Nemotron Labs Diffusion, as published."""
EXCHANGES = 3
"""Times that a layer exchanges a copy in a training step: K/V in forward and again in backward, and dK/dV."""
_BF16_BYTES = 2
_SCHEMES = (Scheme.CONTEXT_PARALLEL, Scheme.BLOCK_PARALLEL, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL)


@dataclass(frozen=True)
class PlanRow:
    """One line of the report.

    Attributes:
        model: name in `MODELS`.
        sequence_length: L, clean tokens.
        group_size: P, ranks of the context group.
        scheme: CP, BP or CSBP.
        rows: rows of both copies on a rank.
        remote_bytes: keys, values and their gradients from other ranks, the same on every rank.
        attention_flops: operations of the attention on the busiest rank.
        linear_flops: operations of the layers' linear parts on a rank.
        imbalance: attention of the busiest rank over that of the least busy one.
        executed_ratio: pairs that all ranks compute over pairs that the mask allows.
        dual_end_speedup: busiest rank's attention under contiguous over that under dual-end assignment; modelled.
        plan_seconds: time that planning took for the last rank.
    """

    model: str
    sequence_length: int
    group_size: int
    scheme: Scheme
    rows: int
    remote_bytes: int
    attention_flops: int
    linear_flops: int
    imbalance: float
    executed_ratio: float
    dual_end_speedup: float
    plan_seconds: float


def plan_row(
    model: str, scheme: Scheme, sequence_length: int, group_size: int, block_size: int, clean_attention: CleanAttention
) -> PlanRow:
    """Plan one training step of one sequence.

    Args:
        model: name in `MODELS`.
        scheme: CP, BP or CSBP.
        sequence_length: L, clean tokens.
        group_size: P, at least 2.
        block_size: M.
        clean_attention: mask of the clean copy.

    Raises:
        ValueError: the length does not divide.
    """
    shape = MODELS[model]
    started = time.perf_counter()
    plan = last_rank_plan(scheme, sequence_length, group_size, block_size, clean_attention)
    assert plan.num_pairs, "every rank computes something"
    plan_seconds = time.perf_counter() - started
    sample, sharding = plan.rows.sample, plan.rows.sharding
    work = attention_work(sample, sharding, plan.mask)
    return PlanRow(
        model=model,
        sequence_length=sequence_length,
        group_size=group_size,
        scheme=scheme,
        rows=plan.rows.num_rows,
        remote_bytes=shape.num_layers * EXCHANGES * exchanged_bytes(plan, shape),
        attention_flops=shape.num_layers * max(work.pairs) * shape.attention_flops_per_pair,
        linear_flops=shape.num_layers * plan.rows.num_rows * shape.layer_flops_per_row,
        imbalance=work.imbalance,
        executed_ratio=work.executed_ratio,
        dual_end_speedup=assignment_speedup(sample, sharding, plan.mask),
        plan_seconds=plan_seconds,
    )


def last_rank_plan(
    scheme: Scheme, sequence_length: int, group_size: int, block_size: int, clean_attention: CleanAttention
) -> AttentionPlan:
    """Return the plan of the last rank, made anew; see `plan_row`."""
    sample, sharding = Sample(sequence_length, block_size), Sharding(group_size, scheme)
    return plan_attention(rank_rows(sample, sharding, group_size - 1), Mask(clean_attention))


def exchanged_bytes(plan: AttentionPlan, shape: ModelShape, itemsize: int = _BF16_BYTES) -> int:
    """Return the bytes from other ranks of one exchange of every copy that the plan exchanges, in one layer."""
    per_row = row_bytes(shape.num_key_value_heads, shape.head_dim, itemsize)
    return sum(transfer.gather_bytes(per_row) for _, transfer in plan.transfers)


def plan_rows(
    models: Iterable[str],
    lengths: Sequence[int],
    group_sizes: Sequence[int],
    block_size: int,
    clean_attention: CleanAttention,
) -> list[PlanRow]:
    """Plan every model, length and group size under every scheme; see `plan_row`."""
    return [
        plan_row(model, scheme, length, group_size, block_size, clean_attention)
        for model in models
        for length in lengths
        for group_size in group_sizes
        for scheme in _SCHEMES
    ]


def format_rows(rows: Sequence[PlanRow]) -> list[str]:
    """Return the lines of a table."""
    columns = "{:<13} {:>9} {:>4} {:<5} {:>10} {:>12} {:>12} {:>10} {:>10} {:>9} {:>9}".format
    header = (
        "model",
        "L",
        "P",
        "",
        "rows",
        "GiB moved",
        "attn PFLOP",
        "lin PFLOP",
        "imbalance",
        "executed",
        "dual-end",
    )
    lines = [columns(*header)]
    lines.extend(
        columns(
            row.model,
            row.sequence_length,
            row.group_size,
            row.scheme,
            row.rows,
            f"{row.remote_bytes / 2**30:.2f}",
            f"{row.attention_flops / 1e15:.4g}",
            f"{row.linear_flops / 1e15:.4g}",
            f"{row.imbalance:.4f}",
            f"{row.executed_ratio:.4f}",
            f"{row.dual_end_speedup:.3f}",
        )
        for row in rows
    )
    lines.append(
        "Per rank, for one training step of one sequence, all layers, bf16. imbalance: attention of the busiest over "
        "the least busy rank. executed: pairs computed over pairs allowed. dual-end: modelled speed-up of attention "
        "over contiguous assignment. Planning one rank took at most "
        f"{max(row.plan_seconds for row in rows) * 1e3:.1f} ms."
    )
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table that the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_csbp.tools.plan_report", description=__doc__.split("\n\n")[1]
    )
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS), help="Default: all.")
    parser.add_argument(
        "--seq-length", nargs="+", type=int, default=[2**power for power in range(16, 21)], help="Default: 64K to 1M."
    )
    parser.add_argument("--bp-size", nargs="+", type=int, default=[2, 4, 8, 16, 32, 64], help="Default: 2 to 64.")
    parser.add_argument("--diffusion-block-size", type=int, default=32)
    parser.add_argument("--clean-attention", choices=[str(c) for c in CleanAttention], default="token-causal")
    parser.add_argument("--json", metavar="FILE", help="Write the rows as a JSON list, too.")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="Start every exchange on empty tensors, and compare its bytes with the plan.",
    )
    parser.add_argument(
        "--tiles",
        action="store_true",
        help="In place of the table: what each tile of one layer would cost on an H200, modelled.",
    )
    options = parser.parse_args(argv)
    if options.tiles and (options.json or options.dry_run):
        parser.error("--tiles prints another table, without --json and --dry-run; give it alone, or leave it out.")
    if min(options.bp_size) < 2:
        parser.error(f"--bp-size {min(options.bp_size)} must be at least 2; one rank exchanges nothing.")
    if options.json and (Path(options.json).is_dir() or not Path(options.json).resolve().parent.is_dir()):
        parser.error(f"--json {options.json} is a folder, or in one that does not exist; name a file.")
    try:
        if options.tiles:
            print("\n".join(_tile_lines(options)))
            return
        rows = plan_rows(
            options.model,
            options.seq_length,
            options.bp_size,
            options.diffusion_block_size,
            CleanAttention(options.clean_attention),
        )
    except ValueError as error:
        parser.error(str(error))
    print("\n".join(format_rows(rows)))
    if options.json:
        with open(options.json, "w", encoding="ascii") as file:
            json.dump([asdict(row) for row in rows], file, indent=1)
    if options.dry_run:
        _compare_with_dry_run(rows, options.diffusion_block_size, CleanAttention(options.clean_attention))


def _tile_lines(options: argparse.Namespace) -> list[str]:
    """Return a table for each model, group size and length: the modelled cost of every tile of the last rank."""
    lines = []
    for model, size, length in product(options.model, options.bp_size, options.seq_length):
        shape = MODELS[model]
        heads = Heads(
            num_query_heads=shape.num_query_heads,
            num_key_value_heads=shape.num_key_value_heads,
            head_dim=shape.head_dim,
        )
        clean_attention = CleanAttention(options.clean_attention)
        lines.append(f"{model}, L = {length}, P = {size}, one layer of the last rank; modelled, not measured")
        lines.extend(tile_report(length, size, options.diffusion_block_size, clean_attention, heads))
    return lines


def _compare_with_dry_run(rows: Sequence[PlanRow], block_size: int, clean_attention: CleanAttention) -> None:
    """Start the exchange of every row, and stop the program if one carries anything but the planned bytes."""
    from megatron_csbp.tools.attention_step import exchanged_by_layer  # only this needs PyTorch

    for row in rows:
        shape = MODELS[row.model]
        plan = last_rank_plan(row.scheme, row.sequence_length, row.group_size, block_size, clean_attention)
        carried = shape.num_layers * exchanged_by_layer(plan, shape)
        if carried != row.remote_bytes:
            raise SystemExit(f"{row}: the collectives carry {carried} bytes, not the planned {row.remote_bytes}")
    print(f"dry run: the collectives of all {len(rows)} rows carry exactly the planned bytes")


if __name__ == "__main__":
    main()
