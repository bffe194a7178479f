# SPDX-License-Identifier: Apache-2.0
"""The choice of an attention backend by name and device."""

import torch

from megatron_csbp.transformer.kernels.interface import AttentionKernel
from megatron_csbp.transformer.kernels.reference import ReferenceKernel
from megatron_csbp.transformer.kernels.torch_kernel import TorchCpuKernel


def select_kernel(name: str, device: torch.device) -> AttentionKernel:
    """Return the kernel that `--csbp-attention-backend` names, on `device`.

    Args:
        name: `auto`, `torch` or `reference`.
        device: where the tensors live.

    Raises:
        ValueError: no such backend, or it does not run on this device.
    """
    if name == "reference":
        return ReferenceKernel()
    if name not in ("auto", "torch"):
        raise ValueError(f"--csbp-attention-backend {name!r} is not a backend; use auto, torch or reference.")
    if device.type != "cpu":
        raise ValueError(
            f"--csbp-attention-backend {name} has no kernel for device {device.type!r}; run with --device cpu."
        )
    return TorchCpuKernel()
