# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for those parts of `torch.cuda` that Megatron calls."""

import contextlib
import dataclasses
import functools
import os
import platform
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from megatron_csbp.cpu_runtime.process_memory import ProcessMemory
from megatron_csbp.cpu_runtime.streams import Event, Stream


def _caller_is_megatron() -> bool:
    """Return whether the code that called the calling stand-in belongs to Megatron, not to PyTorch or the user."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("megatron.")


@dataclasses.dataclass(frozen=True)
class CpuProperties:
    """Stand-in for the properties of a CUDA device.

    Attributes:
        name: Says that the device is a CPU.
        total_memory: Memory of the machine, bytes.
        multi_processor_count: Logical CPUs.
        major: Not an age of hardware: 10 is the number from which Megatron drops its demands on older GPUs
            (CUDA_DEVICE_MAX_CONNECTIONS=1 with tensor or context parallelism).
        minor: 0.
    """

    name: str
    total_memory: float
    multi_processor_count: int
    major: int = 10
    minor: int = 0


def properties(device: Any = None) -> CpuProperties:
    """Return the CPU's properties as a CUDA device's."""
    return CpuProperties(f"CPU ({platform.machine()})", ProcessMemory.machine()[1], os.cpu_count() or 1)


def _own_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a function: torch._dynamo keeps rules by function identity and refuses one function under two names."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing: the call only orders or frees work on a device."""


def _no_such_figure(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "--log-straggler needs a GPU's temperature, power, utilization and clock, which the CPU runtime "
        "does not have; leave out --log-straggler"
    )


def _no_memory_history(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "--record-memory-history records CUDA's memory allocator, which the CPU runtime does not use; "
        "leave out --record-memory-history"
    )


class _StreamContext(contextlib.nullcontext[None]):
    """Stand-in for the context manager that selects a stream."""

    def __init__(self, stream: Any) -> None:
        super().__init__()


class _DeviceContext(contextlib.nullcontext[None]):
    """Stand-in for the context manager that selects a device."""

    def __init__(self, device: Any) -> None:
        super().__init__()


def _random_functions() -> dict[str, Callable[..., Any]]:
    """Models draw from PyTorch's CPU generator here, so Megatron's RNG tracker has to move that one."""
    generator = torch.default_generator
    return {
        "manual_seed": lambda seed: generator.manual_seed(int(seed)),
        "manual_seed_all": lambda seed: generator.manual_seed(int(seed)),
        "get_rng_state": lambda device="cuda": generator.get_state(),
        "set_rng_state": lambda new_state, device="cuda": generator.set_state(new_state),
    }


def _device_functions() -> dict[str, Callable[..., Any]]:
    stream = Stream()
    functions: dict[str, Callable[..., Any]] = {
        "_lazy_call": lambda function, **kwargs: function(),
        "memory_allocated": ProcessMemory.resident,
        "memory_reserved": ProcessMemory.resident,
        "max_memory_allocated": ProcessMemory.peak_resident,
        "max_memory_reserved": ProcessMemory.peak_resident,
        "reset_peak_memory_stats": ProcessMemory.reset_peak,
        "memory_stats": ProcessMemory.stats,
        "mem_get_info": ProcessMemory.machine,
        "device_memory_used": ProcessMemory.machine_used,
        "get_device_properties": properties,
        "get_device_name": lambda device=None: properties().name,
        "get_device_capability": lambda device=None: (properties().major, properties().minor),
        "current_device": lambda: 0,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "is_current_stream_capturing": lambda: False,
    }
    for name in ("set_device", "set_stream", "synchronize", "empty_cache", "ipc_collect", "init", "_lazy_init"):
        functions[name] = _nothing
    for name in ("temperature", "power_draw", "utilization", "clock_rate"):
        functions[name] = _no_such_figure
    return functions


def replace_torch_cuda() -> None:
    """Put the stand-ins in place."""
    for name, function in _device_functions().items():
        setattr(torch.cuda, name, _own_function(function))
    for name, function in _random_functions().items():
        setattr(torch.cuda, name, function)
        setattr(torch.cuda.random, name, function)
    objects = {
        "default_generators": (torch.default_generator,),
        # These look at their caller, so nothing may stand between.
        "is_available": lambda: _caller_is_megatron(),
        "is_initialized": lambda: _caller_is_megatron(),
        "device_count": lambda: int(_caller_is_megatron()),
        "Stream": Stream,
        "Event": Event,
        "stream": _StreamContext,
        "device": _DeviceContext,
    }
    for name, value in objects.items():
        setattr(torch.cuda, name, value)
    for name in ("_record_memory_history", "_snapshot", "_dump_snapshot"):
        setattr(torch.cuda.memory, name, _own_function(_no_memory_history))
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, _own_function(_nothing))
