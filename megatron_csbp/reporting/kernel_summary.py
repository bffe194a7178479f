# SPDX-License-Identifier: Apache-2.0
"""What the start summary says of the attention's kernels: which, why, how many launches."""

from argparse import Namespace

import torch

from megatron_csbp.arguments import masks
from megatron_csbp.configuration.performance_arguments import local_key_value_heads
from megatron_csbp.reporting.attention_model import Heads, tile_costs
from megatron_csbp.transformer.geometry.layer_plans import LayerPlans
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.kernels import AttentionKernel, HeadShape
from megatron_csbp.transformer.kernels.operators import ALL_FLASH, operator_names, takes_flash_for_everything
from megatron_csbp.transformer.kernels.selection import choose_backend
from megatron_csbp.transformer.softmax_merge import has_fused_merge


def head_shape(args: Namespace) -> HeadShape:
    """Return the attention heads of a tensor-parallel rank."""
    query, key = args.num_attention_heads // args.tensor_model_parallel_size, local_key_value_heads(args)
    return HeadShape(query, key, args.kv_channels)


def static_chunk_rows(args: Namespace, rows: RankRows) -> int | None:
    """Return C, by which a backend is chosen, as layers will know it: None where samples differ, as packed ones do."""
    return None if args.pack_documents else rows.static_chunk_length


def attention_kernel_lines(
    args: Namespace, kernel: AttentionKernel, plans: LayerPlans, device: torch.device
) -> list[str]:
    """Return the lines of the summary.

    Args:
        args: validated arguments.
        kernel: the backend that was chosen and tested.
        plans: of this rank.
        device: where the tensors live.
    """
    heads = head_shape(args)
    given = args.csbp_attention_backend
    chosen = choose_backend(given, device, args.attention_backend.name, static_chunk_rows(args, plans.rows))
    merge = "one Triton kernel" if has_fused_merge(device.type) else "PyTorch's elementwise operators"
    lines = [
        f"  attention backend: {kernel.name} (--csbp-attention-backend {given}; {chosen.reason}); merge by {merge}"
    ]
    which = ", for a sample of one document" if args.pack_documents else ""
    for mask in masks(args):
        plan = plans.plan(mask)
        names = operator_names(kernel, plan, heads, args.params_dtype, device)
        window = "" if mask.window is None else f", window {mask.window}"
        shown = "; ".join(f"{kind}: {operator}" for kind, operator in names.items())
        costs = tile_costs(
            plan,
            Heads(
                num_query_heads=heads.num_query_heads,
                num_key_value_heads=heads.num_key_value_heads,
                head_dim=heads.head_dim,
            ),
            args.csbp_head_groups,
        )
        forward, backward = sum(c.forward.launches for c in costs), sum(c.backward.launches for c in costs)
        lines.append(
            f"    tiles{window}: {shown}; {len(plan.tiles)} of them, some {forward} launches forward and {backward} "
            f"backward in a layer (modelled, tile by tile{which})"
        )
        if device.type == "cuda" and takes_flash_for_everything(names, torch.__version__):
            lines.append(f"    note: {ALL_FLASH}")
    return lines
