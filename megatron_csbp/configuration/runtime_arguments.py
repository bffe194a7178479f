# SPDX-License-Identifier: Apache-2.0
"""Megatron arguments that this machine cannot honour, and what they become. Imports nothing of Megatron.

On a CPU that is all that names CUDA code. On CUDA it is what is on by default but belongs to a package that is not
installed: Megatron raises, or fails in the first step, without Apex even where Transformer Engine is.
"""

import importlib
from argparse import Namespace
from collections.abc import Callable
from typing import NamedTuple

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
        lambda args: args.layernorm_zero_centered_gamma and args.diffusion_block_size is None,
        "the norm of PyTorch, which runs without --diffusion-block-size have, has no such weights",
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


class _Fused(NamedTuple):
    """An argument that is on by default on CUDA, what it is without its package, and the modules that provide it."""

    name: str
    without: object
    modules: tuple[str, ...]
    what: str


# By the modules that Megatron itself tries to import. One of several is enough.
_CUDA_DEFAULTS = (
    _Fused("transformer_impl", "local", ("transformer_engine.pytorch",), "Transformer Engine"),
    _Fused("apply_rope_fusion", False, ("transformer_engine.pytorch",), "Transformer Engine with its fused RoPE"),
    _Fused(
        "gradient_accumulation_fusion",
        False,
        ("fused_weight_gradient_mlp_cuda",),
        "Apex' fused weight gradient, the output layer's under any layers,",
    ),
    _Fused("no_persist_layer_norm", True, ("apex",), "Apex' persistent layer norm"),
    _Fused("masked_softmax_fusion", False, ("scaled_masked_softmax_cuda",), "Apex' fused softmax"),
)


def adapt_to_runtime(args: Namespace, runtime: RuntimeInfo, is_dry_run: bool = False) -> list[Change]:
    """Change the arguments that name code which this machine lacks, so that a cluster's launch script runs.

    Args:
        args: parsed arguments; changed in place.
        runtime: the device that was chosen.
        is_dry_run: whether the run itself will have another device than this process, unless `--device` says so.

    Returns:
        What was changed, for the start summary.

    Raises:
        ValueError: something is asked for that no other argument could stand in for, such as FP8.
    """
    if runtime.device != "cpu":
        return [
            _change(args, fused.name, fused.without, f"{fused.what} is not installed: no {' or '.join(fused.modules)}")
            for fused in _CUDA_DEFAULTS
            if getattr(args, fused.name, fused.without) != fused.without and not any(map(_imports, fused.modules))
        ]
    if not is_dry_run or args.device == "cpu":
        _refuse_what_needs_a_gpu(args)
    return [
        _change(args, name, value, f"CPU runtime: {reason}")
        for name, value, reason in _CPU_VALUES
        if getattr(args, name, value) != value
    ]


def _refuse_what_needs_a_gpu(args: Namespace) -> None:
    for name, flag in (("fp8", "--fp8-format"), ("fp4", "--fp4-format")):
        if getattr(args, name, None):
            raise ValueError(
                f"{flag} {getattr(args, name)} needs a CUDA device and Transformer Engine; on a CPU use --bf16."
            )
    for flag, is_on, reason, instead in _GPU_ONLY:
        if is_on(args):
            raise ValueError(f"{flag} is not possible on a CPU: {reason}; {instead}.")


def _change(args: Namespace, name: str, value: object, reason: str) -> Change:
    change = Change(name, getattr(args, name), value, reason)
    setattr(args, name, value)
    return change


def _imports(module: str) -> bool:
    """Return whether a module can be imported; a missing one only: what is broken shall say so where it is used."""
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True
