# SPDX-License-Identifier: Apache-2.0
"""Runs Megatron-Core training on a machine without CUDA.

Megatron names the `cuda` device in its source. `install` makes those names mean the CPU, in this process only
and before Megatron is imported: `CpuDeviceMode` rewrites device arguments, and small stand-ins replace those
parts of `torch.cuda` that Megatron calls. Megatron itself is not edited. Where CUDA is used, nothing is changed.

What is reported stays true: event times are wall-clock times, memory figures are this process's resident set size,
`torch.cuda.is_available()` is `True` only for code inside the `megatron` package, and a figure that does not
exist on a CPU (temperature, power) raises.
"""

import atexit
import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import logging
import math
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
import torch.utils.data
from torch.overrides import TorchFunctionMode

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
_CPU = torch.device("cpu")


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


def _caller_is_megatron() -> bool:
    """Return whether the code that called the calling stand-in belongs to Megatron, not to PyTorch or the user."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("megatron.")


# ---------------------------------------------------------------- devices


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
        return _CPU if is_index or _names_cuda(value) else value

    def is_active(self) -> bool:
        """Return whether the calling thread runs under this mode."""
        return self in torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]


class _ThreadSupport:
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


# ---------------------------------------------------------------- torch.cuda


class Stream:
    """Stand-in for `torch.cuda.Stream`: CPU work is done when its call returns, so there is nothing to order."""

    cuda_stream = 0
    device = _CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the lowest and highest stream priority; there is one."""
        return (0, 0)

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Record and return `event`, or a new one."""
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        """Wait for `event`."""

    def wait_stream(self, stream: "Stream") -> None:
        """Wait for `stream`."""

    def synchronize(self) -> None:
        """Wait for all work."""

    def query(self) -> bool:
        """Return whether all work is done."""
        return True


class Event:
    """Stand-in for `torch.cuda.Event` that records the wall clock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        self._seconds = math.nan

    def record(self, stream: Stream | None = None) -> None:
        """Record the time now."""
        del stream
        self._seconds = time.perf_counter()

    def elapsed_time(self, end_event: "Event") -> float:
        """Return the milliseconds from this event to `end_event`."""
        return (end_event._seconds - self._seconds) * 1e3

    def wait(self, stream: Stream | None = None) -> None:
        """Wait for the event."""

    def synchronize(self) -> None:
        """Wait for the event."""

    def query(self) -> bool:
        """Return whether the event has happened."""
        return True


class ProcessMemory:
    """Memory of this process and machine as the operating system reports it: bytes, or NaN where it does not."""

    @staticmethod
    def _proc_field(path: str, field: str) -> float:
        try:
            text = Path(path).read_text()
        except OSError:
            return math.nan
        kibibytes = next((line.split()[1] for line in text.splitlines() if line.startswith(field + ":")), None)
        return math.nan if kibibytes is None else int(kibibytes) * 1024

    @classmethod
    def resident(cls, device: Any = None) -> float:
        """Return the resident set size now."""
        return cls._proc_field("/proc/self/status", "VmRSS")

    @classmethod
    def peak_resident(cls, device: Any = None) -> float:
        """Return the largest resident set size so far, or since `reset_peak`."""
        # The kernel counts the two apart, so the peak can lag by some pages.
        return max(cls._proc_field("/proc/self/status", "VmHWM"), cls.resident())

    @staticmethod
    def reset_peak(device: Any = None) -> None:
        """Restart the peak from the resident set size now.

        Raises:
            OSError: If the operating system has no such reset.
        """
        Path("/proc/self/clear_refs").write_text("5")

    @classmethod
    def machine(cls, device: Any = None) -> tuple[float, float]:
        """Return the memory available to new allocations on this machine, and memory in all."""
        return cls._proc_field("/proc/meminfo", "MemAvailable"), cls._proc_field("/proc/meminfo", "MemTotal")

    @classmethod
    def machine_used(cls, device: Any = None) -> float:
        """Return the memory in use on this machine by all processes."""
        available, total = cls.machine()
        return total - available

    @classmethod
    def stats(cls, device: Any = None) -> dict[str, float]:
        """Return what Megatron logs of `torch.cuda.memory_stats`. A number of allocations is not known: NaN."""
        now, peak = cls.resident(), cls.peak_resident()
        return {
            "reserved_bytes.all.current": now,
            "reserved_bytes.all.peak": peak,
            "allocated_bytes.all.current": now,
            "allocated_bytes.all.peak": peak,
            "allocation.all.current": math.nan,
        }


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


def _properties(device: Any = None) -> CpuProperties:
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
        "get_device_properties": _properties,
        "get_device_name": lambda device=None: _properties().name,
        "get_device_capability": lambda device=None: (_properties().major, _properties().minor),
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


def _replace_torch_cuda() -> None:
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


# ---------------------------------------------------------------- collectives, compilation, data loading, packages


def _gloo_for_nccl(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that creates process groups."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def create(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        if arguments.get("backend") == "nccl":
            arguments["backend"] = "gloo"
        if "NCCL" in type(arguments.get("pg_options")).__qualname__:
            del arguments["pg_options"]
        arguments.pop("device_id", None)
        return function(**arguments)

    return create


def _average_as_sum(function: Callable[..., Any], input_name: str) -> Callable[..., Any]:
    """Wrap a reduction: gloo has no averaging, so the input is divided first and then summed."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def reduce(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        group = arguments.get("group")
        if arguments.get("op") == dist.ReduceOp.AVG and dist.get_backend(group) == "gloo":
            arguments["op"] = dist.ReduceOp.SUM
            num_ranks = dist.get_world_size(group)
            # all_reduce works in place; other inputs are not the callee's to change.
            divide = torch.Tensor.div_ if input_name == "tensor" else torch.Tensor.div
            arguments[input_name] = divide(arguments[input_name], num_ranks)
        return function(**arguments)

    return reduce


def _listed_splits(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an all-to-all: Megatron's MoE turns split sizes into host lists only when they are on a CUDA device."""

    @functools.wraps(function)
    def exchange(*args: Any, **kwargs: Any) -> Any:
        for name in ("output_split_sizes", "input_split_sizes"):
            if isinstance(kwargs.get(name), torch.Tensor):
                kwargs[name] = kwargs[name].tolist()
        return function(*args, **kwargs)

    return exchange


def _replace_collectives() -> None:
    for name in ("init_process_group", "new_group"):
        setattr(dist, name, _gloo_for_nccl(getattr(dist, name)))
    for name, input_name in (("all_reduce", "tensor"), ("reduce_scatter_tensor", "input")):
        setattr(dist, name, _average_as_sum(getattr(dist, name), input_name))
    dist.all_to_all_single = _listed_splits(dist.all_to_all_single)
    atexit.register(_leave_groups)


def _leave_groups() -> None:
    """End gloo's threads while Python still runs: one that needs Python later aborts the process at its end.

    After an error the groups are left as they are, since ending a thread would wait for ranks that no longer answer.
    """
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()


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


# ---------------------------------------------------------------- installation

_installed: RuntimeInfo | None = None


def _install_cpu(reason: str) -> RuntimeInfo:
    hidden = _hide_gpu_packages()
    mode = CpuDeviceMode()
    _ThreadSupport(mode).install()
    _replace_torch_cuda()
    _replace_collectives()
    _replace_data_loader()
    correct_distributed_optimizer_when_imported()
    torch.compile = _no_compile
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_drop_rng_warning)
    mode.__enter__()  # type: ignore[no-untyped-call]  # for the rest of the process
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
