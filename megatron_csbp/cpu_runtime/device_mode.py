# SPDX-License-Identifier: Apache-2.0
"""Device arguments that name CUDA mean the CPU, in every thread and in backward passes."""

import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def _names_cuda(value: object) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))


class CpuDeviceMode(TorchFunctionMode):
    """Makes every `cuda` device argument of a PyTorch function mean the CPU, in the thread that entered it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func` with its device arguments rewritten."""
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        if func is torch.Tensor.cpu or (func is torch.Tensor.to and len(args) > 1 and args[1] == "cpu"):
            # From a device this is a copy; callers (checkpointing, offloading) go on to change the original.
            result = func(*args, **kwargs)
            return result.clone() if result is args[0] else result
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            name: str = func(*args)
            # Megatron's optimizers accept parameters by this name only.
            asked_by = str(sys._getframe(1).f_globals.get("__name__", ""))
            return name.replace("torch.", "torch.cuda.", 1) if asked_by.startswith("megatron.") else name
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], self._device(args[1]), *args[2:])
        if kwargs:
            kwargs = dict(kwargs)
            if kwargs.get("device") is not None:
                kwargs["device"] = self._device(kwargs["device"])
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        return func(*args, **kwargs)

    @staticmethod
    def _device(value: Any) -> Any:
        # A bare integer is a CUDA device index: Megatron passes torch.cuda.current_device().
        is_index = isinstance(value, int) and not isinstance(value, bool)
        return CPU if is_index or _names_cuda(value) else value

    def is_active(self) -> bool:
        """Return whether the calling thread runs under this mode."""
        return self in torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]


class ThreadSupport:
    """Keeps the device mode on where PyTorch would lose it: in new threads, and in backward passes."""

    def __init__(self, mode: CpuDeviceMode) -> None:
        self._mode = mode

    def install(self) -> None:
        """Wrap the start of Python threads and the entry of the autograd engine."""
        start_thread = threading.Thread.start
        run_backward = torch.autograd.graph._engine_run_backward
        mode = self._mode

        def start(thread: threading.Thread) -> None:
            run = thread.run

            def run_in_mode() -> None:
                with mode:
                    run()

            thread.run = run_in_mode  # type: ignore[method-assign]
            start_thread(thread)

        def run_backward_in_mode(*args: Any, **kwargs: Any) -> Any:
            # Tensor.backward is itself dispatched through the mode, which PyTorch turns off for its duration.
            with contextlib.nullcontext() if mode.is_active() else mode:
                return run_backward(*args, **kwargs)

        threading.Thread.start = start  # type: ignore[method-assign, assignment]
        torch.autograd.graph._engine_run_backward = run_backward_in_mode
        torch.autograd._engine_run_backward = run_backward_in_mode  # type: ignore[attr-defined]
