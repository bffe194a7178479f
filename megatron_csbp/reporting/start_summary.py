# SPDX-License-Identifier: Apache-2.0
"""What rank 0 prints before training: versions, device, scheme, ownership, traffic, every changed argument."""

from argparse import Namespace
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from megatron_csbp import megatron_compat
from megatron_csbp.arguments import is_block_diffusion, sequence_layout
from megatron_csbp.configuration.changes import Change
from megatron_csbp.configuration.checkpoint_rules import latest_iteration
from megatron_csbp.configuration.performance_arguments import local_key_value_heads, recomputes_layer, unit_bytes
from megatron_csbp.cpu_runtime import RuntimeInfo
from megatron_csbp.reporting.model_flops import ModelFlops
from megatron_csbp.transformer.attention_plan import AttentionPlan, CleanAttention
from megatron_csbp.transformer.delta_net.kernels import select_delta_kernel
from megatron_csbp.transformer.delta_net.traffic import DeltaNetSizes, layer_volumes
from megatron_csbp.transformer.kernels import AttentionKernel, HeadShape, checked_kernel
from megatron_csbp.transformer.layout import SequenceLayout, Stream
from megatron_csbp.transformer.traffic_ledger import Collective, total

_MAX_RANKS_SHOWN = 8


def print_start_summary(args: Namespace, runtime: RuntimeInfo, changes: Sequence[Change]) -> None:
    """Print the summary on rank 0.

    Raises:
        ValueError: the attention backend cannot run on a rank's device, or is wrong there; all ranks test their own.
    """
    lines = start_summary(args, runtime, changes)
    if args.rank == 0:
        print("\n".join(lines), flush=True)


def start_summary(args: Namespace, runtime: RuntimeInfo, changes: Sequence[Change]) -> list[str]:
    """Return the lines of the summary.

    Args:
        args: validated arguments.
        runtime: the device that was chosen.
        changes: arguments that were changed.
    """
    lines = [f"---------------- megatron_csbp {_version('megatron-csbp')} ----------------"]
    lines.append(
        f"  versions: megatron-core {megatron_compat.megatron_version()}, torch {torch.__version__}, "
        f"transformer-engine {_version('transformer-engine')}"
    )
    lines.append(f"  device: {runtime.device} ({runtime.reason}); {runtime.threads} CPU threads per rank")
    lines.extend(f"    note: {note}" for note in runtime.notes)
    if is_block_diffusion(args):
        lines.extend(_block_diffusion_lines(args, runtime))
    else:
        lines.append("  block diffusion: off (no --diffusion-block-size): plain Megatron")
    if args.load is not None:
        found = latest_iteration(Path(args.load)) is not None or args.ckpt_step is not None
        lines.append(
            f"  --load {args.load}: " + ("found" if found else "NO CHECKPOINT FOUND, starting from random weights")
        )
    if changes:
        lines.append("  arguments changed:")
        lines.extend(f"    {change.name}: {change.before} -> {change.after} ({change.reason})" for change in changes)
    lines.append("-" * len(lines[0]))
    return lines


def _block_diffusion_lines(args: Namespace, runtime: RuntimeInfo) -> list[str]:
    layout = sequence_layout(args, rank=0)
    plan = AttentionPlan(layout, CleanAttention(args.clean_attention))
    kernel = _tested_kernel(args, runtime)
    lines = [
        f"  scheme: {layout.scheme} over {layout.group_size} rank(s); tensor {args.tensor_model_parallel_size} x "
        f"pipeline {args.pipeline_model_parallel_size} x data {args.data_parallel_size}",
        f"  objective: {args.diffusion_objective}, clean attention {args.clean_attention}, noise "
        f"{args.noise_schedule} eps {args.noise_eps}, mask token {args.mask_token_id}",
        f"  sequence: {layout.sequence_length} clean tokens, {layout.num_blocks} blocks of {layout.block_size}, "
        f"{layout.num_chunks} chunks of {layout.chunk_length}; {layout.num_rows} rows per rank",
        f"  attention backend: {kernel.name} (--csbp-attention-backend {args.csbp_attention_backend})",
    ]
    blocks = layout.blocks_per_chunk
    for rank in range(min(layout.group_size, _MAX_RANKS_SHOWN)):
        owned = ", ".join(f"{c} (blocks {c * blocks}-{(c + 1) * blocks - 1})" for c in layout.chunks_of(rank))
        lines.append(f"    rank {rank} owns chunks {owned}")
    if layout.group_size > _MAX_RANKS_SHOWN:
        lines.append(f"    ... and so on ({layout.assignment})")
    lines.append(_traffic_line(args, plan))
    lines.append(_exchange_line(args))
    if getattr(args, "experimental_attention_variant", None) == "gated_delta_net":
        lines.append(_delta_net_line(args, runtime, layout))
    lines.append(_last_layer_line(args))
    lines.append(_flops_line(args))
    if args.hidden_dropout:
        lines.append(f"  note: with --hidden-dropout {args.hidden_dropout} losses differ between topologies")
    return lines


def _tested_kernel(args: Namespace, runtime: RuntimeInfo) -> AttentionKernel:
    device = torch.device("cpu") if runtime.device == "cpu" else torch.device("cuda", args.local_rank)
    query, key = args.num_attention_heads // args.tensor_model_parallel_size, local_key_value_heads(args)
    return checked_kernel(
        args.csbp_attention_backend,
        device,
        args.params_dtype,
        HeadShape(query, key, args.kv_channels),
        args.attention_backend.name,
    )


def _traffic_line(args: Namespace, plan: AttentionPlan) -> str:
    per_stream = {
        stream: 2 * unit_bytes(args, plan, stream) + unit_bytes(args, plan, stream, Collective.REDUCE_SCATTER)
        for stream in Stream
    }
    total = sum(per_stream.values())
    return (
        f"  attention traffic per layer, rank and micro-batch: {total / 2**20:.2f} MiB from other ranks (keys and "
        "values in forward and again in backward, their gradients once; corrupted copy: "
        f"{per_stream[Stream.CORRUPTED]} bytes)"
    )


def _exchange_line(args: Namespace) -> str:
    dtype = args.csbp_grad_reduce_dtype or str(args.params_dtype).removeprefix("torch.")
    return (
        f"  exchange: {local_key_value_heads(args)} key/value heads of a rank in {args.csbp_head_groups} group(s), "
        f"gradients in {dtype}; loss: at most {args.csbp_loss_chunk_rows or 'all'} rows of logits at a time"
    )


def _delta_net_line(args: Namespace, runtime: RuntimeInfo, layout: SequenceLayout) -> str:
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
    volumes = layer_volumes(1, layout, sizes, args.micro_batch_size, training=True, recomputed=recomputed)
    mebibytes = total(volumes.values()).remote_bytes / 2**20
    return (
        f"  gated delta nets: {kernel.name} (--csbp-delta-net-backend {args.csbp_delta_net_backend}); "
        f"{mebibytes:.2f} MiB from other ranks per layer, rank and micro-batch; at most "
        f"{args.csbp_delta_net_state_mib} MiB of states alive at a time"
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
