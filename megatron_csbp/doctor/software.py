# SPDX-License-Identifier: Apache-2.0
"""Packages: which are there, in which versions, and whether they can be used. Needs neither PyTorch nor Megatron."""

import importlib.metadata
import importlib.util
import os
import platform
import sys

from megatron_csbp.child_process import import_error, run_python
from megatron_csbp.doctor.findings import Finding, fail, ok, warn
from megatron_csbp.versions import NOT_INSTALLED, package_version

_LEAST_PYTHON = (3, 12)
_LEAST_TORCH = (2, 9)
_TRANSFORMER_ENGINE = ((2, 9), (2, 21))
"""From the first, and below the second."""
_TRANSFORMER_ENGINE_FIX = "pip install --no-build-isolation 'transformer-engine[core-cu13,pytorch]>=2.9,<2.21'"
_MEGATRON_FIX = "pip install 'megatron-core>=0.19,<0.20'"
_TORCH = "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available())"
_NCCL = "import torch; print('.'.join(map(str, torch.cuda.nccl.version())))"
_MEGATRON = """
import importlib, sys, warnings
warnings.simplefilter("ignore")
from megatron_csbp import cpu_runtime, required_symbols
cpu_runtime.install("auto")
required_symbols.check_megatron_version()
importlib.import_module("megatron.core.datasets.helpers_cpp")
for symbol in required_symbols.REQUIRED_SYMBOLS:
    symbol.check()
print(required_symbols.megatron_version(), len(required_symbols.REQUIRED_SYMBOLS))
"""
_FUSED_ATTENTION = """
import torch
from megatron_csbp.transformer.kernels import HeadShape, checked_kernel
checked_kernel("transformer_engine", torch.device("cuda", 0), torch.bfloat16, HeadShape(8, 2, 128))
"""


def check_software() -> list[Finding]:
    """Look at every package that a run needs or can use."""
    torch, has_gpu = _torch()
    findings = [_python(), torch]
    if torch.state == "fail":
        return findings
    return [*findings, _nccl(has_gpu), _megatron(), *_transformer_engine(has_gpu), _apex(has_gpu), _triton(has_gpu)]


def _python() -> Finding:
    version = platform.python_version()
    if sys.version_info[:2] < _LEAST_PYTHON:
        return fail("Python", f"{version}; 3.12 or later is needed", "make the environment with python3.12 -m venv")
    return ok("Python", f"{version} ({sys.executable})")


def _torch() -> tuple[Finding, bool]:
    """Return the finding, and whether there is a CUDA device."""
    ended = run_python("-W", "ignore", "-c", _TORCH)
    if not ended.succeeded:
        return fail("PyTorch", f"does not import: {ended.error}", "pip install 'torch>=2.9' into this Python"), False
    version, cuda, is_available = ended.output.split()[-3:]
    if _numbers(version) < _LEAST_TORCH:
        return fail("PyTorch", f"{version}; 2.9 or later is needed", "pip install 'torch>=2.9'"), False
    device = "a CUDA device is there" if is_available == "True" else "no CUDA device: runs use the CPU runtime"
    finding = ok("PyTorch", f"{version}, built for CUDA {cuda}; {device}")
    if is_available != "True" and os.path.exists("/proc/driver/nvidia"):
        finding = fail(
            "PyTorch",
            f"{version}, built for CUDA {cuda}, sees no CUDA device, and the NVIDIA driver is loaded",
            "install a PyTorch for a CUDA that the driver knows (nvidia-smi shows it), unset CUDA_VISIBLE_DEVICES, or "
            "give the container its GPUs (docker run --gpus all)",
        )
    return finding, is_available == "True"


def _nccl(has_gpu: bool) -> Finding:
    if not has_gpu:
        return ok("NCCL", "not tried: no CUDA device; ranks on CPUs talk by gloo")
    ended = run_python("-W", "ignore", "-c", _NCCL)
    if not ended.succeeded:
        return fail("NCCL", f"PyTorch has none: {ended.error}", "install a CUDA build of PyTorch")
    return ok("NCCL", ended.output.split()[-1])


def _megatron() -> Finding:
    ended = run_python("-c", _MEGATRON)
    if not ended.succeeded:
        detail = f"{package_version('megatron-core')} cannot be used: {ended.error}"
        return fail("Megatron-Core", detail, f"{_MEGATRON_FIX}, or put such a checkout first in PYTHONPATH")
    version, number = ended.output.split()[-2:]
    return ok("Megatron-Core", f"{version}; all {number} symbols that this package uses are there")


def _transformer_engine(has_gpu: bool) -> list[Finding]:
    name, fused = "Transformer Engine", "Transformer Engine's fused attention"
    version = package_version("transformer-engine")
    if version == NOT_INSTALLED and importlib.util.find_spec("transformer_engine") is None:
        detail = "not installed: PyTorch's layers and attention kernels stand in"
        return [ok(name, detail) if not has_gpu else warn(name, detail, f"{_TRANSFORMER_ENGINE_FIX} (docs/gpu.md)")]
    least, below = _TRANSFORMER_ENGINE
    if version != NOT_INSTALLED and not least <= _numbers(version) < below:
        detail = f"{version}; from 2.9 to 2.20 are supported"
        return [fail(name, detail, f"{_TRANSFORMER_ENGINE_FIX}, or uninstall it")]
    error = import_error("transformer_engine.pytorch")
    if error is not None:
        detail = f"{version} is installed and does not import: {error}"
        fix = f"build its PyTorch part for this PyTorch ({_TRANSFORMER_ENGINE_FIX}), or uninstall it"
        return [fail(name, detail, fix) if has_gpu else warn(name, f"{detail} (runs on a CPU hide it)", fix)]
    found = [ok(name, f"{version}, imports")]
    if os.environ.get("NVTE_FUSED_ATTN", "1") == "0":
        return [*found, warn(fused, "NVTE_FUSED_ATTN=0 turns it off", "unset NVTE_FUSED_ATTN")]
    if not has_gpu:
        return [*found, ok(fused, "not tried: no CUDA device")]
    ended = run_python("-W", "ignore", "-c", _FUSED_ATTENTION)
    if not ended.succeeded:
        return [*found, warn(fused, f"cannot be used: {ended.error}", "train with --csbp-attention-backend torch")]
    return [*found, ok(fused, "agrees with the reference on small cases")]


def _apex(has_gpu: bool) -> Finding:
    """NVIDIA's Apex has `apex.optimizers`; the registry's package of that name is a web framework's toolkit."""
    fix = "pip uninstall apex; build NVIDIA's from github.com/NVIDIA/apex, or do without"
    if importlib.util.find_spec("apex") is None:
        detail = "not installed: the entries turn off what needs it, and say so"
        return ok("Apex", detail)
    if not _has_submodule("apex", "optimizers"):
        return fail(
            "Apex",
            f"the package apex {package_version('apex')} is not NVIDIA's: it has no apex.optimizers. Megatron imports "
            "from it and fails, or leaves its own stand-ins out",
            fix,
        )
    error = import_error("apex.optimizers")
    if error is not None:
        detail = f"{package_version('apex')} is installed and does not import: {error}"
        return fail("Apex", detail, fix) if has_gpu else warn("Apex", f"{detail} (runs on a CPU hide it)", fix)
    return ok("Apex", package_version("apex"))


def _has_submodule(package: str, name: str) -> bool:
    """Return whether a package has a submodule, without importing either."""
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return any(
        os.path.isdir(os.path.join(folder, name)) or os.path.isfile(os.path.join(folder, f"{name}.py"))
        for folder in folders
    )


def _triton(has_gpu: bool) -> Finding:
    version = package_version("triton")
    if version == NOT_INSTALLED:
        detail = "not installed: FlexAttention and the fused merge need it"
        return (
            warn("Triton", detail, "pip install triton, as PyTorch's CUDA wheels do")
            if has_gpu
            else ok("Triton", detail)
        )
    error = import_error("triton")
    if error is not None:
        return warn("Triton", f"{version} does not import: {error}", "install the version that PyTorch asks for")
    return ok("Triton", version)


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")[:2]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)
