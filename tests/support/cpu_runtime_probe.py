# SPDX-License-Identifier: Apache-2.0
"""Installs the CPU runtime in a fresh process and prints, as JSON, what code then finds.

Code "inside Megatron" is code whose module name says so, which is how the runtime tells.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from megatron_csbp import cpu_runtime

MIB = 1024 * 1024


def inside_megatron(expression: str, **names: Any) -> Any:
    """Evaluate an expression as if it stood in a module of Megatron."""
    scope = {"__name__": "megatron.core.probe", "torch": torch, **names}
    return eval(expression, scope)


class OnDevice(Dataset[torch.Tensor]):
    """A dataset whose samples are made on the device."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), index, device="cuda")


class AllocatesInBackward(torch.autograd.Function):
    """The identity, with a backward that makes a tensor on the device."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * torch.ones(grad.shape, device="cuda")


def devices() -> dict[str, str]:
    """Return the device type that each way to name CUDA leads to."""
    x = torch.zeros(2)
    module = torch.nn.Linear(2, 2, device="cuda")
    tensors = {
        "factory": torch.zeros(2, device="cuda"),
        "factory with index": torch.zeros(2, device=torch.cuda.current_device()),
        "factory with device object": torch.tensor([1.0], device=torch.device("cuda", 0)),
        "pinned": torch.zeros(2, pin_memory=True),
        "to": x.to("cuda:0"),
        "to index": x.to(torch.cuda.current_device()),
        "to keyword": x.to(device="cuda", dtype=torch.float64),
        "cuda": x.cuda(non_blocking=True),
        "new": x.new_empty((2,), device="cuda"),
        "like": torch.empty_like(x, device="cuda"),
        "module": module.weight,
        "module to": torch.nn.Linear(2, 2).to("cuda").weight,
        "module cuda": torch.nn.Linear(2, 2).cuda(torch.cuda.current_device()).weight,
        "data worker": next(iter(DataLoader(OnDevice(), batch_size=2, num_workers=1, pin_memory=True))),
        "thread": in_thread(lambda: torch.zeros(2, device="cuda")),
        "thread pool": ThreadPoolExecutor(1).submit(lambda: torch.zeros(2, device="cuda")).result(),
        "backward method": gradient(lambda y, x: y.backward()),
        "backward function": gradient(lambda y, x: torch.autograd.backward(y)),
        "grad function": gradient(lambda y, x: torch.autograd.grad(y, x)),
        "backward in thread": in_thread(lambda: gradient(lambda y, x: y.backward())),
    }
    return {name: tensor.device.type for name, tensor in tensors.items()}


def device_under(context: str) -> str:
    """Return the device of a tensor that is made with a device as the context."""
    with torch.device(context):
        return torch.zeros(2).device.type


def in_thread(function: Callable[[], torch.Tensor]) -> torch.Tensor:
    results: list[torch.Tensor] = []

    class OwnRun(threading.Thread):
        def run(self) -> None:
            results.append(function())

    thread = OwnRun()
    thread.start()
    thread.join()
    return results[0]


def gradient(differentiate: Callable[[torch.Tensor, torch.Tensor], Any]) -> torch.Tensor:
    x = torch.ones(2, requires_grad=True)
    result = differentiate(AllocatesInBackward.apply(x).sum(), x)
    grad = x.grad if result is None else result[0]
    assert grad is not None
    return grad


def copies() -> dict[str, bool]:
    """Return whether a result shares memory with what it was made from."""
    x = torch.zeros(2)
    results = {"cpu": x.cpu(), "to cpu": x.to("cpu"), "cuda": x.cuda(), "to own device": x.to(x.device)}
    return {name: result.data_ptr() == x.data_ptr() for name, result in results.items()}


def who_sees_cuda() -> dict[str, Any]:
    return {
        "type here": torch.zeros(1).type(),
        "type in megatron": inside_megatron("torch.zeros(1, dtype=torch.bfloat16).type()"),
        "available here": torch.cuda.is_available(),
        "available in megatron": inside_megatron("torch.cuda.is_available()"),
        "count here": torch.cuda.device_count(),
        "count in megatron": inside_megatron("torch.cuda.device_count()"),
        "name": torch.cuda.get_device_name(),
        "properties name": torch.cuda.get_device_properties(0).name,
        "compiled": torch.compile(who_sees_cuda) is who_sees_cuda,
        "compiled by decorator": torch.compile(dynamic=True)(who_sees_cuda) is who_sees_cuda,
    }


def memory() -> dict[str, float]:
    import psutil

    before = torch.cuda.memory_allocated()
    block = torch.ones(200 * MIB // 4)
    during, independent = torch.cuda.memory_allocated(), psutil.Process().memory_info().rss
    del block
    stats = torch.cuda.memory_stats()
    result = {
        "before": before,
        "during": during,
        "independent": independent,
        "peak": torch.cuda.max_memory_allocated(),
        "peak in stats": stats["allocated_bytes.all.peak"],
        "count in stats": stats["allocation.all.current"],
        "total": torch.cuda.get_device_properties(0).total_memory,
        "independent total": psutil.virtual_memory().total,
    }
    torch.cuda.reset_peak_memory_stats()
    return result | {"peak after reset": torch.cuda.max_memory_allocated()}


def absent_figures() -> dict[str, str]:
    messages = {}
    calls = {
        "temperature": torch.cuda.temperature,
        "power": torch.cuda.power_draw,
        "history": torch.cuda.memory._record_memory_history,
    }
    for name, call in calls.items():
        try:
            messages[name] = f"answered {call()}"
        except RuntimeError as error:
            messages[name] = str(error)
    return messages


def time_of_events() -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    time.sleep(0.05)
    torch.cuda.current_stream().record_event(end)
    return start.elapsed_time(end)


def random_numbers() -> dict[str, bool]:
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    again = torch.rand(3)
    torch.manual_seed(5)
    seeded = torch.rand(3)
    state = torch.get_rng_state()
    list(DataLoader(OnDevice(), batch_size=2))
    return {
        "state": bool(first.equal(again)),
        "seed": bool(first.equal(seeded)),
        "loaders leave it alone": bool(state.equal(torch.get_rng_state())),
    }


def main() -> None:
    torch.set_num_threads(3)
    info = cpu_runtime.install("cpu")
    result: dict[str, Any] = {
        "device": info.device,
        "reason": info.reason,
        "threads": info.threads,
        "notes": list(info.notes),
        "idempotent": cpu_runtime.install("auto") is info and cpu_runtime.install("cpu") is info,
        "devices": devices(),
        "made under meta": device_under("meta"),
        "copies": copies(),
        "sees": who_sees_cuda(),
        "memory": memory(),
        "absent": absent_figures(),
        "milliseconds": time_of_events(),
        "random": random_numbers(),
    }
    try:
        cpu_runtime.install("cuda")
    except (RuntimeError, ValueError) as error:
        result["other device"] = str(error)
    import megatron.core.tensor_parallel.random as megatron_random

    result["megatron finds transformer engine"] = megatron_random.HAVE_TE
    result["hidden modules"] = [name for name, module in sys.modules.items() if module is None]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
