# SPDX-License-Identifier: Apache-2.0
"""Flags that change speed and memory but no result beyond rounding, and what they are by default.

Imports nothing of Megatron.
"""

import argparse
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from megatron_csbp.transformer.geometry.plan import AttentionPlan
from megatron_csbp.transformer.geometry.scheme import CopyKind
from megatron_csbp.transformer.geometry.transfers import row_bytes
from megatron_csbp.transformer.head_groups import default_head_groups
from megatron_csbp.transformer.traffic_ledger import Collective

# Fewer rows at a time would leave the output layer's matrix product too small to be efficient.
_LEAST_CHUNK_ROWS = 512
_CHUNK_BYTES = 2**29

DELTA_NET_BACKENDS = ("auto", "fla", "torch")
"""Values of `--csbp-delta-net-backend`."""

GRAD_REDUCE_ITEMSIZES = {"bf16": 2, "fp32": 4}
"""Values of `--csbp-grad-reduce-dtype` and their bytes for each element."""


def add_performance_arguments(group: ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the flags."""
    group.add_argument(
        "--csbp-head-groups",
        type=int,
        default=None,
        metavar="G",
        help="Exchange and compute key/value heads in G groups, with their query heads: while one group attends, the "
        "next is gathered and the gradients of the one before are reduce-scattered, so that the gathered keys of at "
        "most two groups are alive (recomputation keeps all groups of the one layer at work). Must divide the "
        "key/value heads of a tensor-parallel rank. Default: from sizes, at most 4, with at least 32 MiB of the clean "
        "copy in a group; the start summary says how many.",
    )
    group.add_argument(
        "--csbp-grad-reduce-dtype",
        choices=list(GRAD_REDUCE_ITEMSIZES),
        default=None,
        help="Dtype in which key and value gradients are reduce-scattered over the context group. They are summed in "
        "fp32 on each rank. Default: that of the parameters. fp32 sends twice the bytes of bf16.",
    )
    group.add_argument(
        "--csbp-loss-chunk-rows",
        type=int,
        default=None,
        metavar="ROWS",
        help="Rows whose logits exist at a time. A micro-batch with more rows with loss computes their logits in "
        "chunks, and a second time in the backward pass. 0: all rows at once. Default: as many as have 512 MiB of "
        "fp32 logits, and at least 512.",
    )
    group.add_argument(
        "--csbp-delta-net-backend",
        choices=DELTA_NET_BACKENDS,
        default="auto",
        help="Kernels of gated delta nets. auto is torch on a CPU and with --deterministic-mode, and else fla, which "
        "must then be installed (pip install 'megatron-csbp[fla]').",
    )
    group.add_argument(
        "--csbp-delta-net-state-mib",
        type=int,
        default=256,
        metavar="MIB",
        help="States of a gated delta net that are alive at a time, on one rank. A rank whose layer has more computes "
        "its chunks segment by segment, and each segment again in the backward pass; states of one step (a block of "
        "each chunk) are always alive.",
    )


def check_head_groups(args: Namespace) -> None:
    """G divides the key/value heads of a tensor-parallel rank."""
    groups = args.csbp_head_groups
    if groups is None or not args.num_attention_heads:  # Megatron asks for the latter
        return
    heads = local_key_value_heads(args)
    if groups < 1 or heads % groups:
        works = [str(count) for count in range(1, heads + 1) if heads % count == 0]
        raise ValueError(
            f"--csbp-head-groups {groups} must divide the {heads} key/value heads of a tensor-parallel rank "
            f"(--tensor-model-parallel-size {args.tensor_model_parallel_size}); use {' or '.join(works)}."
        )


def check_loss_chunk_rows(args: Namespace) -> None:
    """Rows in a chunk of the loss are not negative."""
    rows = args.csbp_loss_chunk_rows
    if rows is not None and rows < 0:
        raise ValueError(
            f"--csbp-loss-chunk-rows {rows} must be at least 0; 0 computes all rows at once, 4096 is a usual value."
        )


def fill_head_groups(args: Namespace, plans: Sequence[AttentionPlan]) -> None:
    """Choose the number of head groups unless the user did, for the layers that gather most.

    Args:
        args: validated arguments; changed in place.
        plans: any rank's plans of the model's layers.
    """
    if args.csbp_head_groups is None:
        heads = local_key_value_heads(args)
        per_row = row_bytes(heads, args.kv_channels, args.params_dtype.itemsize, args.micro_batch_size)
        clean_bytes = max(plan.clean.buffer_bytes(per_row) for plan in plans)
        args.csbp_head_groups = default_head_groups(heads, clean_bytes, recomputes=recomputes_attention(args))


def fill_loss_chunk_rows(args: Namespace) -> None:
    """Choose how many rows of logits exist at a time unless the user did. Call once the tokenizer is built.

    Args:
        args: validated arguments; changed in place.
    """
    if args.csbp_loss_chunk_rows is None:
        vocab_size = args.padded_vocab_size // args.tensor_model_parallel_size
        args.csbp_loss_chunk_rows = default_chunk_rows(vocab_size)


def default_chunk_rows(vocab_size: int) -> int:
    """Return how many rows have 512 MiB of fp32 logits, as a power of two.

    Args:
        vocab_size: V, on this tensor-parallel rank.
    """
    fitting: int = max(_LEAST_CHUNK_ROWS, _CHUNK_BYTES // (4 * vocab_size))
    return 1 << (fitting.bit_length() - 1)


def why_last_layer_is_whole(args: Namespace, loss_on_clean_rows: bool, *, attends: bool = True) -> str | None:
    """Return why the last layer computes clean rows to the end; None if it can leave them at keys and values.

    Args:
        args: validated arguments.
        loss_on_clean_rows: whether the objective asks the clean copy for something.
        attends: whether the last layer has attention.
    """
    corrupted = args.corrupted_views * args.clean_seq_length // args.context_parallel_size
    reasons = {
        "the objective has a loss on the clean copy": loss_on_clean_rows,
        "it is a gated delta net": not attends,
        "experts balance their load over both copies": args.num_experts is not None,
        "--attention-output-gate gates every row": getattr(args, "attention_output_gate", False),
        "--tp-comm-overlap has buffers for all rows": args.tp_comm_overlap,
        "--fine-grained-activation-offloading releases whole tensors": args.fine_grained_activation_offloading,
        "its layers come from --spec": args.spec is not None,
        f"--sequence-parallel cannot split the {corrupted} corrupted rows of a rank": args.sequence_parallel
        and corrupted % args.tensor_model_parallel_size != 0,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def recomputes_attention(args: Namespace) -> bool:
    """Return whether the attention runs again in the backward pass, in any layer."""
    if args.recompute_granularity == "selective":
        return "core_attn" in (args.recompute_modules or ["core_attn"])
    return args.recompute_granularity is not None


def recomputes_layer(args: Namespace, index: int) -> bool:
    """Return whether a whole layer runs again in the backward pass.

    Args:
        args: validated arguments.
        index: number of the layer among those of its pipeline stage (or part of one), from 0.
    """
    if args.recompute_granularity != "full":
        return False
    return bool(args.recompute_method == "uniform" or index < args.recompute_num_layers)


def local_key_value_heads(args: Namespace) -> int:
    """Return K, the key/value heads on a tensor-parallel rank."""
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    heads: int = groups // args.tensor_model_parallel_size
    return max(1, heads)


def exchange_bytes(
    args: Namespace,
    plan: AttentionPlan,
    copies: CopyKind,
    collective: Collective = Collective.GATHER,
    micro_batch_size: int | None = None,
) -> int:
    """Return the bytes that one exchange of one kind of copies brings to this rank from others, all heads.

    Args:
        args: Megatron's validated arguments.
        plan: the rank's plan.
        copies: clean or corrupted.
        collective: what is done; gradients may have a dtype of their own.
        micro_batch_size: sequences; those of training by default.
    """
    itemsize: int = args.params_dtype.itemsize
    reduces = collective is Collective.REDUCE_SCATTER
    if reduces and args.csbp_grad_reduce_dtype is not None:
        itemsize = GRAD_REDUCE_ITEMSIZES[args.csbp_grad_reduce_dtype]
    sequences = micro_batch_size or args.micro_batch_size
    per_row = row_bytes(local_key_value_heads(args), args.kv_channels, itemsize, sequences)
    transfer = plan.transfer(copies)
    return transfer.reduce_bytes(per_row) if reduces else transfer.gather_bytes(per_row)
