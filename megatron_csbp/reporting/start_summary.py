# SPDX-License-Identifier: Apache-2.0
"""What rank 0 prints before training: versions, device, scheme, ownership, traffic, every changed argument."""

from argparse import Namespace
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import torch

from megatron_csbp import megatron_compat
from megatron_csbp.arguments import has_delta_nets, is_block_diffusion, masks, static_plans
from megatron_csbp.configuration.changes import Change
from megatron_csbp.configuration.checkpoint_rules import Start
from megatron_csbp.configuration.performance_arguments import (
    exchange_bytes,
    local_key_value_heads,
    recomputes_layer,
)
from megatron_csbp.cpu_runtime import RuntimeInfo
from megatron_csbp.reporting.kernel_summary import attention_kernel_lines, head_shape, static_chunk_rows
from megatron_csbp.reporting.mask_token import mask_token_lines
from megatron_csbp.reporting.model_flops import ModelFlops
from megatron_csbp.reporting.packing_report import packing_lines
from megatron_csbp.transformer.delta_net.kernels import select_delta_kernel
from megatron_csbp.transformer.delta_net.traffic import DeltaNetSizes, layer_volumes
from megatron_csbp.transformer.geometry.layer_plans import LayerPlans
from megatron_csbp.transformer.geometry.plan import AttentionPlan
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.scheme import CopyKind, Scheme
from megatron_csbp.transformer.kernels import AttentionKernel, checked_kernel
from megatron_csbp.transformer.traffic_ledger import Collective, total

_MAX_RANKS_SHOWN = 8


def print_start_summary(args: Namespace, runtime: RuntimeInfo, changes: Sequence[Change], start: Start) -> None:
    """Print the summary on rank 0.

    Raises:
        ValueError: the attention backend cannot run on a rank's device, or is wrong there; all ranks test their own.
    """
    lines = start_summary(args, runtime, changes, start)
    if args.rank == 0:
        print("\n".join(lines), flush=True)


def start_summary(args: Namespace, runtime: RuntimeInfo, changes: Sequence[Change], start: Start) -> list[str]:
    """Return the lines of the summary.

    Args:
        args: validated arguments.
        runtime: the device that was chosen.
        changes: arguments that were changed.
        start: what the run starts from.
    """
    lines = [f"---------------- megatron_csbp {_version('megatron-csbp')} ----------------"]
    lines.append(
        f"  versions: megatron-core {megatron_compat.megatron_version()}, torch {torch.__version__}, "
        f"transformer-engine {_version('transformer-engine')}, apex {_version('apex')} (where both are not installed, "
        "PyTorch's norms and optimizers stand in)"
    )
    lines.append(f"  device: {runtime.device} ({runtime.reason}); {runtime.threads} CPU threads per rank")
    lines.extend(f"    note: {note}" for note in runtime.notes)
    if is_block_diffusion(args):
        lines.extend(_block_diffusion_lines(args, runtime))
    else:
        lines.append("  block diffusion: off (no --diffusion-block-size): plain Megatron")
    lines.extend(_start_lines(args, start))
    if changes:
        lines.append("  arguments changed:")
        lines.extend(f"    {change.name}: {change.before} -> {change.after} ({change.reason})" for change in changes)
    lines.append("-" * len(lines[0]))
    return lines


def _start_lines(args: Namespace, start: Start) -> list[str]:
    if start.checkpoint is None:
        first = f": no checkpoint in --load {args.load} yet" if args.load is not None else ""
        return [f"  start: random weights{first}"]
    what = (
        f"goes on after iteration {start.checkpoint.iteration}" if start.is_resumed else "a new run from the weights"
    )
    lines = [f"  start: {what}, {start.checkpoint.flag} ({start.checkpoint.path.name})"]
    return lines + [f"    note: {note}" for note in start.notes]


def _block_diffusion_lines(args: Namespace, runtime: RuntimeInfo) -> list[str]:
    plans = static_plans(args, rank=0)
    rows, sharding, sample = plans.rows, plans.rows.sharding, plans.rows.sample
    views = "" if sample.num_views == 1 else f" in {sample.num_views} corrupted views of one clean copy"
    lines = [
        f"  scheme: {sharding.scheme} over {sharding.group_size} rank(s); tensor {args.tensor_model_parallel_size} x "
        f"pipeline {args.pipeline_model_parallel_size} x data {args.data_parallel_size}",
        *scheme_notes(rows),
        f"  objective: {args.diffusion_objective}, clean attention {args.clean_attention}, noise "
        f"{args.noise_schedule} eps {args.noise_eps}",
        *(mask_token_lines(args) if args.rank == 0 else []),
        f"  sequence: {sample.length} clean tokens, {sample.num_blocks} blocks of {sample.block_size}{views}, "
        f"{sharding.num_chunks} chunks of {rows.chunk_length}; {rows.num_rows} rows per rank",
        *(packing_lines(args) if args.pack_documents and args.rank == 0 else []),
        *_kernel_lines(args, runtime, plans),
    ]
    blocks = rows.chunk_length // sample.block_size
    for rank in range(min(sharding.group_size, _MAX_RANKS_SHOWN)):
        owned = ", ".join(f"{c} (blocks {c * blocks}-{(c + 1) * blocks - 1})" for c in sharding.chunks_of(rank))
        lines.append(f"    rank {rank} owns chunks {owned}")
    if sharding.group_size > _MAX_RANKS_SHOWN:
        lines.append(f"    ... and so on ({sharding.assignment})")
    lines.extend(_traffic_line(args, plans.plan(mask)) for mask in masks(args))
    lines.append(_exchange_line(args))
    if has_delta_nets(args):
        lines.append(_delta_net_line(args, runtime, rows))
    lines.append(_last_layer_line(args))
    lines.append(_flops_line(args))
    if args.hidden_dropout:
        lines.append(f"  note: with --hidden-dropout {args.hidden_dropout} losses differ between topologies")
    return lines


def _device(args: Namespace, runtime: RuntimeInfo) -> torch.device:
    return torch.device("cpu") if runtime.device == "cpu" else torch.device("cuda", args.local_rank)


def _tested_kernel(args: Namespace, runtime: RuntimeInfo, rows: RankRows) -> AttentionKernel:
    return checked_kernel(
        args.csbp_attention_backend,
        _device(args, runtime),
        args.params_dtype,
        head_shape(args),
        args.attention_backend.name,
        static_chunk_rows(args, rows),
    )


def _kernel_lines(args: Namespace, runtime: RuntimeInfo, plans: LayerPlans) -> list[str]:
    """Test the kernel on this rank's device, and say what it is; a dry run has none to test."""
    if args.csbp_dry_run is not None:
        return [f"  attention backend: not tested (--csbp-attention-backend {args.csbp_attention_backend})"]
    kernel = _tested_kernel(args, runtime, plans.rows)
    return attention_kernel_lines(args, kernel, plans, _device(args, runtime))


def scheme_notes(rows: RankRows) -> list[str]:
    """Return what a user should know of a scheme that costs more than CSBP."""
    scheme, size = rows.sharding.scheme, rows.sharding.group_size
    if scheme is Scheme.CONTEXT_PARALLEL:
        return ["    note: the CP baseline, which also exchanges corrupted keys and values (--context-scheme cp)"]
    if scheme is not Scheme.BLOCK_PARALLEL:
        return []
    csbp_rows = rows.num_corrupted_rows + rows.sample.length // size
    return [
        f"    note: pure BP computes and keeps all {rows.sample.length} clean rows on each of the {size} ranks: "
        f"{rows.num_rows} rows a rank, {rows.num_rows / csbp_rows:.2f} times those of CSBP "
        f"(--context-parallel-size {size}), and exchanges nothing"
    ]


def _traffic_line(args: Namespace, plan: AttentionPlan) -> str:
    by_copies = {
        copies: 2 * exchange_bytes(args, plan, copies) + exchange_bytes(args, plan, copies, Collective.REDUCE_SCATTER)
        for copies in CopyKind
    }
    window = "" if plan.mask.window is None else f" with a window of {plan.mask.window}"
    return (
        f"  attention traffic per layer{window}, rank and micro-batch: {sum(by_copies.values()) / 2**20:.2f} MiB from "
        f"other ranks, by {plan.clean.lowering} (keys and values in forward and again in backward, their gradients "
        f"once; corrupted copies: {by_copies[CopyKind.CORRUPTED]} bytes)"
    )


def _exchange_line(args: Namespace) -> str:
    dtype = args.csbp_grad_reduce_dtype or str(args.params_dtype).removeprefix("torch.")
    return (
        f"  exchange: {local_key_value_heads(args)} key/value heads of a rank in {args.csbp_head_groups} group(s), "
        f"gradients in {dtype}; loss: at most {args.csbp_loss_chunk_rows or 'all'} rows of logits at a time"
    )


def _delta_net_line(args: Namespace, runtime: RuntimeInfo, rows: RankRows) -> str:
    """Say how delta nets run, and refuse kernels that are not there."""
    kernel = select_delta_kernel(
        args.csbp_delta_net_backend,
        torch.device("cpu" if runtime.device == "cpu" else "cuda"),
        args.deterministic_mode,
    )
    sizes = DeltaNetSizes(
        key_heads=args.linear_num_key_heads // args.tensor_model_parallel_size,
        value_heads=args.linear_num_value_heads // args.tensor_model_parallel_size,
        key_dim=args.linear_key_head_dim,
        value_dim=args.linear_value_head_dim,
        look_back=args.linear_conv_kernel_dim - 1,
        row_itemsize=args.params_dtype.itemsize,
    )
    recomputed = recomputes_layer(args, 0)
    volumes = layer_volumes(1, rows, sizes, args.micro_batch_size, training=True, recomputed=recomputed)
    stays = "; active blocks stay with the owner of their chunk" if args.pack_documents else ""
    mebibytes = total(volumes.values()).remote_bytes / 2**20
    return (
        f"  gated delta nets: {kernel.name} (--csbp-delta-net-backend {args.csbp_delta_net_backend}); "
        f"{mebibytes:.2f} MiB from other ranks per layer, rank and micro-batch; at most "
        f"{args.csbp_delta_net_state_mib} MiB of states alive at a time{stays}"
    )


def _last_layer_line(args: Namespace) -> str:
    if args.csbp_whole_last_layer is not None:
        return f"  last layer: whole, since {args.csbp_whole_last_layer}"
    return "  last layer: in training, clean rows end at their keys and values (no loss on the clean copy)"


def _flops_line(args: Namespace) -> str:
    counted, stock = ModelFlops(args).per_sequence()
    return (
        f"  FLOPs report: {counted / 1e12:.4g} TFLOP per sequence, for the pairs that the mask allows, plus the "
        "logits of rows with loss (Megatron's own formula takes both copies for one causal sequence: "
        f"{stock / 1e12:.4g} TFLOP, plus the logits of all rows)"
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
