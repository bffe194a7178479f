# SPDX-License-Identifier: Apache-2.0
"""Runs Megatron-Core training on a machine without CUDA.

Megatron names the `cuda` device in its source. `install` makes those names mean the CPU, in this process only
and before Megatron is imported: functions with a device argument rewrite it, and small stand-ins replace those
parts of `torch.cuda` that Megatron calls. Megatron itself is not edited. Where CUDA is used, nothing is changed.

What is reported stays true: event times are wall-clock times, memory figures are this process's resident set size,
`torch.cuda.is_available()` is `True` only for code inside the `megatron` package, and a figure that does not
exist on a CPU (temperature, power) raises.
"""

from megatron_csbp.cpu_runtime.installation import RuntimeInfo, install

__all__ = ["RuntimeInfo", "install"]
