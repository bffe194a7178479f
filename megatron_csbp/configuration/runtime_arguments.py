# SPDX-License-Identifier: Apache-2.0
"""Megatron arguments that a CPU run cannot honour, and what they become. Imports nothing of Megatron."""

from argparse import Namespace
from collections.abc import Callable

from megatron_csbp.configuration.changes import Change
from megatron_csbp.cpu_runtime import RuntimeInfo

_CPU_VALUES: tuple[tuple[str, object, str], ...] = (
    ("transformer_impl", "local", "Transformer Engine has no CPU kernels"),
    ("no_persist_layer_norm", True, "the persistent layer norm is an Apex CUDA kernel"),
    ("gradient_accumulation_fusion", False, "the fused weight gradient is an Apex CUDA kernel"),
    ("masked_softmax_fusion", False, "the fused softmax is a CUDA kernel"),
    ("moe_permute_fusion", False, "the fused permutation is a Transformer Engine CUDA kernel"),
    ("moe_router_fusion", False, "the fused router is a Transformer Engine CUDA kernel"),
    ("use_transformer_engine_op_fuser", False, "Transformer Engine has no CPU kernels"),
    ("apply_rope_fusion", False, "the fused RoPE is a Transformer Engine CUDA kernel"),
    ("distributed_backend", "gloo", "NCCL needs CUDA devices"),
    ("tp_comm_overlap", False, "userbuffers are CUDA memory"),
)

# Flag, whether it is on, why a CPU cannot do it, and what works.
_GPU_ONLY: tuple[tuple[str, Callable[[Namespace], object], str, str], ...] = (
    (
        "--apply-layernorm-1p",
        lambda args: args.layernorm_zero_centered_gamma,
        "PyTorch's norm has no such weights; Transformer Engine's has",
        "leave the flag out, or run on a GPU",
    ),
    (
        "--profile",
        lambda args: args.profile and not args.use_pytorch_profiler,
        "it starts and stops CUDA's profiler",
        "add --use-pytorch-profiler",
    ),
    (
        "--optimizer-cpu-offload",
        lambda args: args.optimizer_cpu_offload,
        "it moves the optimizer of a GPU to the CPU, where it is already",
        "leave the flag out",
    ),
    (
        "--use-precision-aware-optimizer",
        lambda args: args.use_precision_aware_optimizer,
        "it is Transformer Engine's fused Adam",
        "leave the flag out",
    ),
    (
        "--cpu-offloading-num-layers",
        lambda args: args.cpu_offloading_num_layers,
        "it moves activations from a GPU to the CPU, where they are already",
        "leave the flag out",
    ),
    (
        "--record-memory-history",
        lambda args: args.record_memory_history,
        "it records CUDA's memory allocator",
        "leave the flag out",
    ),
    (
        "--log-straggler",
        lambda args: args.log_straggler,
        "it reads a GPU's temperature, power and clock",
        "leave the flag out",
    ),
)


def adapt_to_runtime(args: Namespace, runtime: RuntimeInfo, is_dry_run: bool = False) -> list[Change]:
    """Change the arguments that name CUDA-only code, so that a cluster's launch script runs on a CPU.

    Args:
        args: parsed arguments; changed in place on the CPU runtime only.
        runtime: the device that was chosen.
        is_dry_run: whether the run itself will have another device than this process, unless `--device` says so.

    Returns:
        What was changed, for the start summary.

    Raises:
        ValueError: something is asked for that no other argument could stand in for, such as FP8.
    """
    if runtime.device != "cpu":
        return []
    if not is_dry_run or args.device == "cpu":
        _refuse_what_needs_a_gpu(args)
    changes = []
    for name, value, reason in _CPU_VALUES:
        before = getattr(args, name, value)
        if before != value:
            changes.append(Change(name, before, value, f"CPU runtime: {reason}"))
            setattr(args, name, value)
    return changes


def _refuse_what_needs_a_gpu(args: Namespace) -> None:
    for name, flag in (("fp8", "--fp8-format"), ("fp4", "--fp4-format")):
        if getattr(args, name, None):
            raise ValueError(
                f"{flag} {getattr(args, name)} needs a CUDA device and Transformer Engine; on a CPU use --bf16."
            )
    for flag, is_on, reason, instead in _GPU_ONLY:
        if is_on(args):
            raise ValueError(f"{flag} is not possible on a CPU: {reason}; {instead}.")
