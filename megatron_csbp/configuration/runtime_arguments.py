# SPDX-License-Identifier: Apache-2.0
"""Megatron arguments that a CPU run cannot honour, and what they become. Imports nothing of Megatron."""

from argparse import Namespace

from megatron_csbp.configuration.changes import Change
from megatron_csbp.cpu_runtime import RuntimeInfo

_CPU_VALUES: tuple[tuple[str, object, str], ...] = (
    ("transformer_impl", "local", "Transformer Engine has no CPU kernels"),
    ("no_persist_layer_norm", True, "the persistent layer norm is an Apex CUDA kernel"),
    ("gradient_accumulation_fusion", False, "the fused weight gradient is an Apex CUDA kernel"),
    ("masked_softmax_fusion", False, "the fused softmax is a CUDA kernel"),
    ("apply_rope_fusion", False, "the fused RoPE is a Transformer Engine CUDA kernel"),
    ("distributed_backend", "gloo", "NCCL needs CUDA devices"),
    ("tp_comm_overlap", False, "userbuffers are CUDA memory"),
)


def adapt_to_runtime(args: Namespace, runtime: RuntimeInfo) -> list[Change]:
    """Change the arguments that name CUDA-only code, so that a cluster's launch script runs on a CPU.

    Args:
        args: parsed arguments; changed in place on the CPU runtime only.
        runtime: the device that was chosen.

    Returns:
        What was changed, for the start summary.

    Raises:
        ValueError: FP8 or FP4 is asked for, which no other argument could stand in for.
    """
    if runtime.device != "cpu":
        return []
    for name, flag in (("fp8", "--fp8-format"), ("fp4", "--fp4-format")):
        if getattr(args, name, None):
            raise ValueError(
                f"{flag} {getattr(args, name)} needs a CUDA device and Transformer Engine; on a CPU use --bf16."
            )
    changes = []
    for name, value, reason in _CPU_VALUES:
        before = getattr(args, name, value)
        if before != value:
            changes.append(Change(name, before, value, f"CPU runtime: {reason}"))
            setattr(args, name, value)
    return changes
