# SPDX-License-Identifier: Apache-2.0
"""Lets a run on a CPU take the decisions of one on an H200 that has neither Transformer Engine nor Apex."""

import dataclasses
import os
from typing import Any

import torch

from megatron_csbp import cpu_runtime
from megatron_csbp.cpu_runtime import torch_cuda
from megatron_csbp.reporting import start_summary
from megatron_csbp.transformer.kernels import AttentionKernel, select_kernel

HOPPER = 9


def pretend_hopper() -> None:
    """Say "cuda" and compute capability 9 to whoever asks; the tensors stay on the CPU runtime, kernels included.

    That runtime hides the packages whose kernels need a GPU, and stands gloo in for NCCL.
    """
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    install = cpu_runtime.install

    def install_and_say_cuda(device: Any) -> cpu_runtime.RuntimeInfo:
        return dataclasses.replace(install("cpu"), device="cuda", notes=())

    def properties(device: Any = None) -> torch_cuda.CpuProperties:
        return dataclasses.replace(torch_cuda.properties(device), major=HOPPER)

    def cpu_kernel(args: Any, runtime: Any, rows: Any) -> AttentionKernel:
        return select_kernel("torch", torch.device("cpu"))

    install("cpu")
    cpu_runtime.install = install_and_say_cuda
    torch.cuda.get_device_properties = properties
    start_summary._tested_kernel = cpu_kernel
    start_summary._device = lambda args, runtime: torch.device("cpu")
