# SPDX-License-Identifier: Apache-2.0
"""Attention kernels behind one small interface, one file a backend."""

from megatron_csbp.transformer.kernels.interface import AttentionKernel
from megatron_csbp.transformer.kernels.selection import select_kernel
from megatron_csbp.transformer.kernels.self_test import HeadShape, checked_kernel

__all__ = ["AttentionKernel", "HeadShape", "checked_kernel", "select_kernel"]
