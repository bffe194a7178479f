# SPDX-License-Identifier: Apache-2.0
"""Device arguments that name CUDA mean the CPU.

The functions that take a device are replaced, and no other: a `TorchFunctionMode`, which sees every call of PyTorch,
takes a fifth of the time of a small model, and has to be carried into threads and backward passes.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CPU = torch.device("cpu")

# fmt: off
MAKE_TENSORS: dict[Any, tuple[str, ...]] = {
    torch: (
        "arange", "as_tensor", "asarray", "bartlett_window", "blackman_window", "empty", "empty_like",
        "empty_permuted", "empty_quantized", "empty_strided", "eye", "full", "full_like", "hamming_window",
        "hann_window", "kaiser_window", "linspace", "logspace", "normal", "ones", "ones_like", "rand", "rand_like",
        "randint", "randint_like", "randn", "randn_like", "randperm", "range", "scalar_tensor", "sparse_bsc_tensor",
        "sparse_bsr_tensor", "sparse_compressed_tensor", "sparse_coo_tensor", "sparse_csc_tensor",
        "sparse_csr_tensor", "tensor", "tril_indices", "triu_indices", "zeros", "zeros_like",
    ),
    torch.fft: ("fftfreq", "rfftfreq"),
    torch.nested: ("nested_tensor",),
    Tensor: ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros"),
}
# fmt: on
"""Functions with a keyword `device`, by their owner."""


def replace_device_arguments() -> None:
    """Make every `cuda` device argument of a PyTorch function mean the CPU."""
    # At the first use of a device as a context, PyTorch gathers the functions that it changes.
    with torch.device("meta"):
        torch.empty(0)
    for owner, names in MAKE_TENSORS.items():
        for name in names:
            setattr(owner, name, _on_cpu(getattr(owner, name)))
    for name, replaced in {"to": _to, "cpu": _cpu, "type": _type}.items():
        setattr(Tensor, name, replaced(getattr(Tensor, name)))
    for name in ("cuda", "pin_memory"):
        setattr(Tensor, name, lambda tensor, *args, **kwargs: tensor)
    Tensor.record_stream = lambda tensor, stream: None  # type: ignore[method-assign, assignment]


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes a tensor, without CUDA devices and pinned memory."""

    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = _device(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return on_cpu


def _to(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args:
            if isinstance(args[0], str) and args[0] == "cpu":
                return _copied(tensor, function(tensor, *args, **kwargs))
            args = (_device(args[0]), *args[1:])
        if kwargs.get("device") is not None:
            kwargs["device"] = _device(kwargs["device"])
        return function(tensor, *args, **kwargs)

    return to


def _cpu(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def cpu(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _copied(tensor, function(tensor, *args, **kwargs))

    return cpu


def _copied(tensor: Tensor, moved: Tensor) -> Tensor:
    """From a device this is a copy; callers (checkpointing, offloading) go on to change the original."""
    return moved.clone() if moved is tensor else moved


def _type(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def type_name(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return function(tensor, *args, **kwargs)
        name: str = function(tensor)
        # Megatron's optimizers accept parameters by this name only.
        asked_by = str(sys._getframe(1).f_globals.get("__name__", ""))
        return name.replace("torch.", "torch.cuda.", 1) if asked_by.startswith("megatron.") else name

    return type_name


def _device(value: Any) -> Any:
    """Return the CPU for what names CUDA; a bare integer does: Megatron passes `torch.cuda.current_device()`."""
    if isinstance(value, torch.device):
        return CPU if value.type == "cuda" else value
    if isinstance(value, str):
        return CPU if value == "cuda" or value.startswith("cuda:") else value
    return CPU if isinstance(value, int) and not isinstance(value, bool) else value
