# SPDX-License-Identifier: Apache-2.0
"""Gloo does what Megatron asks of NCCL."""

import atexit
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


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


def replace_collectives() -> None:
    """Put gloo in the place of NCCL, and end its groups with the process."""
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
