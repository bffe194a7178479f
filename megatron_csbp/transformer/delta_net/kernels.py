# SPDX-License-Identifier: Apache-2.0
"""Which kernel computes the gated delta rule."""

import torch

from megatron_csbp.transformer.delta_net.fla_kernel import FlaDeltaRule, fla_version
from megatron_csbp.transformer.delta_net.rows import DeltaRuleKernel
from megatron_csbp.transformer.delta_net.torch_kernel import TorchDeltaRule


def select_delta_kernel(backend: str, device: torch.device, deterministic: bool = False) -> DeltaRuleKernel:
    """Return the kernel for a device.

    Args:
        backend: value of `--csbp-delta-net-backend`; `auto` is `torch` on a CPU and with `--deterministic-mode`, and
            `fla` on CUDA.
        device: where the tensors are.
        deterministic: whether `--deterministic-mode` is on.

    Raises:
        ValueError: fla is asked for on a CPU or with `--deterministic-mode`, or is not installed.
    """
    if backend == "torch" or (backend == "auto" and (device.type == "cpu" or deterministic)):
        return TorchDeltaRule()
    if device.type == "cpu":
        raise ValueError(f"--csbp-delta-net-backend {backend} needs a CUDA device; use auto or torch on a CPU.")
    if deterministic:
        raise ValueError(
            f"--csbp-delta-net-backend {backend} is not deterministic; with --deterministic-mode use auto or torch."
        )
    if fla_version() is None:
        raise ValueError(
            f"--csbp-delta-net-backend {backend} needs the package fla-core, which is not installed or cannot be "
            "imported; pip install 'megatron-csbp[fla]', or use --csbp-delta-net-backend torch, which is slower."
        )
    return FlaDeltaRule()
