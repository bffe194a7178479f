# SPDX-License-Identifier: Apache-2.0
"""Rules on ranks, heads and modules that Megatron checks late, badly or not at all. Imports nothing of Megatron."""

import importlib.util
import math
import os
from argparse import Namespace


def check_world_size(args: Namespace) -> None:
    """The number of ranks is a multiple of tensor x pipeline x context-parallel size."""
    group_size = max(args.context_parallel_size, args.block_parallel_size)
    needed = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * group_size
    if args.world_size % needed:
        sizes = {
            "--tensor-model-parallel-size": args.tensor_model_parallel_size,
            "--pipeline-model-parallel-size": args.pipeline_model_parallel_size,
            "--context-parallel-size": args.context_parallel_size,
            "--block-parallel-size": args.block_parallel_size,
        }
        named = " ".join(f"{flag} {size}" for flag, size in sizes.items() if size > 1)
        raise ValueError(
            f"{named}: needs a multiple of {needed} ranks, and this job has {args.world_size} (block and context "
            f"parallelism share their ranks); {_how_to_start(needed, args.world_size)}."
        )


def _how_to_start(needed: int, world_size: int) -> str:
    """Return an example of a job whose ranks are a multiple of a number, on nodes as large as this job's."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if per_node >= world_size:
        return f"start it with torchrun --nproc-per-node {needed}, for example"
    ranks = math.lcm(needed, per_node)
    return f"start it on {ranks // per_node} nodes of {per_node}, for example: torchrun --nnodes {ranks // per_node}"


def check_heads(args: Namespace) -> None:
    """Key/value heads divide query heads, tensor parallelism divides both or leaves one key/value head a rank."""
    heads, tensor_size = args.num_attention_heads, args.tensor_model_parallel_size
    if not heads:
        return  # Megatron asks for the flag
    groups = args.num_query_groups if args.group_query_attention else heads
    if not groups or groups < 1 or heads % groups:
        works = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
        raise ValueError(
            f"--num-query-groups {groups} must divide --num-attention-heads {heads}, so that each key/value head "
            f"serves equally many query heads; {works} work."
        )
    if heads % tensor_size or (groups % tensor_size and tensor_size % groups):
        works = ", ".join(
            str(size)
            for size in range(1, heads + 1)
            if heads % size == 0 and (groups % size == 0 or size % groups == 0)
        )
        raise ValueError(
            f"--tensor-model-parallel-size {tensor_size} cannot divide --num-attention-heads {heads} with {groups} "
            f"key/value heads (--num-query-groups); {works} work."
        )


def check_recomputation(args: Namespace) -> None:
    """Recomputation that is described in full, and that Megatron 0.19 can do."""
    if args.recompute_granularity == "full" and None in (args.recompute_method, args.recompute_num_layers):
        raise ValueError(
            "--recompute-granularity full needs --recompute-method and --recompute-num-layers; for example "
            "--recompute-method uniform --recompute-num-layers 1."
        )
    modules = set(args.recompute_modules or ()) if args.recompute_granularity == "selective" else set()
    # Whatever --transformer-impl is.
    needing = sorted({"layernorm", "moe_act"} & modules)
    if needing and importlib.util.find_spec("transformer_engine") is None:
        raise ValueError(
            f"--recompute-modules {' '.join(needing)} needs Transformer Engine, which is not installed (a CPU run "
            "hides it); use --recompute-modules core_attn mlp, or --recompute-granularity full."
        )
    if "mlp" in modules and args.add_bias_linear:
        raise ValueError(
            "--recompute-modules mlp hangs in the backward pass of Megatron 0.19 where the linear layers have biases; "
            "use --disable-bias-linear, or --recompute-modules core_attn."
        )


def check_delta_net(args: Namespace) -> None:
    """Gated delta nets: all that they need is given, and their heads divide as Megatron divides them."""
    if args.experimental_attention_variant != "gated_delta_net":
        if args.linear_attention_freq is not None:
            raise ValueError(
                f"--linear-attention-freq {args.linear_attention_freq} says which layers are linear attention, but "
                "not of which kind; add --experimental-attention-variant gated_delta_net, or leave it out."
            )
        return
    if args.linear_attention_freq is None:
        raise ValueError(
            "--experimental-attention-variant gated_delta_net needs --linear-attention-freq; 4 makes three of four "
            "layers gated delta nets, as Qwen3.5 has them."
        )
    if args.num_layers is not None:  # else Megatron asks for it
        _check_frequency(args.linear_attention_freq, args.num_layers)
    _check_delta_net_sizes(args)
    if not args.swiglu:
        raise ValueError(
            "--experimental-attention-variant gated_delta_net needs --swiglu: its layers have the activation of the "
            "MLP, and that must be SiLU."
        )
    if args.csbp_delta_net_state_mib < 1:
        raise ValueError(
            f"--csbp-delta-net-state-mib {args.csbp_delta_net_state_mib} must be at least 1; 256 is the default."
        )
    if "gdn_norm_out" in (args.recompute_modules or ()):
        raise ValueError(
            "--recompute-modules gdn_norm_out is not supported with --diffusion-block-size; use core_attn or mlp, or "
            "--recompute-granularity full."
        )
    group_size = max(args.context_parallel_size, args.block_parallel_size)
    shares = args.tensor_model_parallel_size * group_size
    for flag, heads in (
        ("--linear-num-key-heads", args.linear_num_key_heads),
        ("--linear-num-value-heads", args.linear_num_value_heads),
    ):
        if heads % shares:
            works = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
            raise ValueError(
                f"{flag} {heads} must be a multiple of tensor- times context-parallel size, which is {shares}: "
                "Megatron 0.19 demands it of every model with gated delta nets; sizes whose product is one of "
                f"{works} work."
            )


def _check_frequency(frequency: int | list[int], num_layers: int) -> None:
    """`--linear-attention-freq` is a number, or says for each layer whether it is a gated delta net."""
    given = f"--linear-attention-freq {frequency}"
    if isinstance(frequency, int):
        if frequency < 1:
            raise ValueError(f"{given} must be at least 1; 4 makes every fourth layer full attention.")
    elif len(frequency) != num_layers or set(frequency) - {0, 1}:
        raise ValueError(
            f"{given} has {len(frequency)} entries and --num-layers is {num_layers}: it must have a 1 for each gated "
            f"delta net and a 0 for each full attention, for example {'([1]*3+[0])*' + str(-(-num_layers // 4))}."
        )
    if frequency > num_layers if isinstance(frequency, int) else all(frequency):
        raise ValueError(
            f"{given} makes all {num_layers} layers gated delta nets; with --diffusion-block-size at least one must "
            f"be full attention, as --linear-attention-freq {num_layers} makes the last one."
        )


def _check_delta_net_sizes(args: Namespace) -> None:
    """Sizes of gated delta nets that Megatron asserts, or takes and computes nothing with."""
    for flag, size, least in (
        ("--linear-conv-kernel-dim", args.linear_conv_kernel_dim, 2),
        ("--linear-key-head-dim", args.linear_key_head_dim, 1),
        ("--linear-value-head-dim", args.linear_value_head_dim, 1),
        ("--linear-num-key-heads", args.linear_num_key_heads, 1),
    ):
        if size < least:
            raise ValueError(f"{flag} {size} must be at least {least}; leave it out for Megatron's default.")
    keys, values = args.linear_num_key_heads, args.linear_num_value_heads
    if values < 1 or values % keys:
        raise ValueError(
            f"--linear-num-value-heads {values} must be a multiple of --linear-num-key-heads {keys}, for example "
            f"{max(1, -(-values // keys)) * keys}."
        )
