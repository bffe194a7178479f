# SPDX-License-Identifier: Apache-2.0
"""Chooses the device and puts the pieces of the CPU runtime in place."""

import dataclasses
import functools
import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.utils.data

from megatron_csbp.cpu_runtime.collectives import replace_collectives
from megatron_csbp.cpu_runtime.device_arguments import replace_device_arguments
from megatron_csbp.cpu_runtime.torch_cuda import replace_torch_cuda
from megatron_csbp.torch_adam import correct_distributed_optimizer_when_imported

# GPU-only packages that Megatron imports when it finds them; their kernels cannot run here.
GPU_PACKAGES = (
    "transformer_engine",
    "transformer_engine_torch",
    "apex",
    "amp_C",
    "flash_attn",
    "flash_attn_2_cuda",
    "flash_attn_3",
    "flash_attn_interface",
    "flash_mla",
    "fused_layer_norm_cuda",
    "fused_weight_gradient_mlp_cuda",
    "grouped_gemm",
    "deep_ep",
    "mamba_ssm",
    "causal_conv1d",
    "flashinfer",
)


@dataclasses.dataclass(frozen=True)
class RuntimeInfo:
    """The device that training runs on.

    Attributes:
        device: `"cpu"` (this module's runtime is installed) or `"cuda"` (nothing was changed).
        reason: Why that device was chosen, as one sentence for the start summary.
        threads: CPU threads that PyTorch uses for one operation on this rank.
        notes: what was replaced or hidden and what the figures mean, one sentence each; empty for `"cuda"`.
    """

    device: Literal["cpu", "cuda"]
    reason: str
    threads: int
    notes: tuple[str, ...] = ()


def _no_compile(model: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
    """Stand-in for `torch.compile`, as a call and as a decorator: the function itself."""
    return model if model is not None else lambda function: function


def _replace_data_loader() -> None:
    original_init = torch.utils.data.DataLoader.__init__

    @functools.wraps(original_init)
    def init(loader: Any, *args: Any, **kwargs: Any) -> None:
        original_init(loader, *args, **kwargs)
        loader.pin_memory = False
        if loader.generator is None:
            # Only some ranks build loaders. A draw of worker seeds from the default generator, which is the one that
            # dropout uses here, would put those ranks out of step with the others.
            loader.generator = torch.Generator()
            loader.generator.manual_seed(torch.initial_seed())

    torch.utils.data.DataLoader.__init__ = init  # type: ignore[method-assign, assignment]


def _drop_rng_warning(record: logging.LogRecord) -> bool:
    """Megatron warns when the CPU generator moves inside its CUDA generator's context; here they are one generator."""
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def _hide_gpu_packages() -> list[str]:
    hidden = []
    for package in GPU_PACKAGES:
        if sys.modules.get(package) is None and (package in sys.modules or importlib.util.find_spec(package) is None):
            continue
        hidden.append(package)
        for name in [package, *(name for name in sys.modules if name.startswith(package + "."))]:
            sys.modules[name] = None  # type: ignore[assignment]
    return hidden


_installed: RuntimeInfo | None = None


def _install_cpu(reason: str) -> RuntimeInfo:
    hidden = _hide_gpu_packages()
    replace_device_arguments()
    replace_torch_cuda()
    replace_collectives()
    _replace_data_loader()
    correct_distributed_optimizer_when_imported()
    torch.compile = _no_compile
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_drop_rng_warning)
    notes = [
        "device 'cuda' means the CPU",
        "process groups use gloo, also where 'nccl' is asked for",
        "torch.compile returns its function unchanged",
        "memory figures are this process's resident set size (allocated and reserved: now; max: peak)",
    ]
    if hidden:
        notes.append("hidden because they need a GPU: " + ", ".join(hidden))
    return RuntimeInfo("cpu", reason, torch.get_num_threads(), tuple(notes))


def _no_cuda_reason() -> str:
    if torch.version.cuda is None:
        return f"no CUDA device: torch {torch.__version__} is built without CUDA"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hint = "" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible!r}"
    return f"no CUDA device: torch {torch.__version__} finds none{hint}"


def install(device: Literal["auto", "cpu", "cuda"]) -> RuntimeInfo:
    """Choose the device and, for the CPU, make Megatron run on it. Call it before Megatron is imported.

    Args:
        device: `"auto"` takes the CPU only if no CUDA device exists; `"cpu"` and `"cuda"` insist. With CUDA
            chosen nothing is changed. Later calls return the first call's result.

    Returns:
        The device, why it was chosen, and what was replaced.

    Raises:
        ValueError: If `device` is not one of the three, or is `"cuda"` without a CUDA device.
        RuntimeError: If Megatron is already imported, or an earlier call chose the other device.
    """
    global _installed
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device {device}: must be one of auto, cpu, cuda; for example --device auto")
    if _installed is not None:
        if device not in ("auto", _installed.device):
            raise RuntimeError(
                f"--device {device}: this process already runs on {_installed.device}; choose it at the start"
            )
        return _installed
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ValueError(
            f"--device cuda: needs a CUDA device; {_no_cuda_reason()}. --device cpu or --device auto works"
        )
    if device == "cuda" or (device == "auto" and has_cuda):
        reason = "--device cuda" if device == "cuda" else f"CUDA device found: {torch.cuda.get_device_name()}"
        _installed = RuntimeInfo("cuda", reason, torch.get_num_threads())
        return _installed
    imported = [name for name in ("megatron.core", "megatron.training") if name in sys.modules]
    if imported:
        raise RuntimeError(
            f"{imported[0]} is already imported; call megatron_csbp.cpu_runtime.install before importing Megatron"
        )
    _installed = _install_cpu("--device cpu" if device == "cpu" else _no_cuda_reason())
    return _installed
