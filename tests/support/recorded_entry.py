# SPDX-License-Identifier: Apache-2.0
"""Runs a training entry as its users do and notes every loss at full precision, where the log prints seven digits.

    torchrun ... -m tests.support.recorded_entry '{"entry": "pretrain_gpt", "arguments": [...], "records": "FILE"}'

The entries know nothing of it: Megatron's logging functions are wrapped before the entry is called.
"""

import functools
import importlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]


def run(request: dict[str, Any]) -> None:
    """Run an entry.

    Args:
        request: `entry`: "pretrain_gpt", "launch" (of the script that the arguments start with), or "plain" (that
            script on nothing but the CPU runtime); `arguments`; `records`: file to append JSON lines to; `hooks`:
            functions ("module:function") to call before the entry.
    """
    from megatron_csbp import cpu_runtime

    arguments: list[str] = request["arguments"]
    cpu_runtime.install("cpu")
    record_to(Path(request["records"]))
    sys.argv = [request["entry"], *arguments]  # a hook may change it
    for hook in request.get("hooks", []):
        module, function = hook.split(":")
        getattr(importlib.import_module(module), function)()
    if request["entry"] == "plain":
        run_plain(arguments)
    else:
        importlib.import_module(f"megatron_csbp.{request['entry']}").main()


def run_plain(arguments: list[str]) -> None:
    """Run a script as `python SCRIPT ...` would, with none of this package but the CPU runtime."""
    from megatron_csbp import megatron_compat

    megatron_compat.ensure_dataset_helpers()
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).parent))
    runpy.run_path(arguments[0], run_name="__main__")


def record_to(path: Path) -> None:
    """Wrap Megatron's logging so that the last rank appends what is logged to a file."""
    training: Any = importlib.import_module("megatron.training.training")
    if int(os.environ["RANK"]) != int(os.environ["WORLD_SIZE"]) - 1:
        return
    log, evaluate = training.training_log, training.evaluate

    @functools.wraps(log)
    def training_log(loss_dict: Any, *rest: Any, **keywords: Any) -> Any:
        _, learning_rate, iteration, _, _, skipped, grad_norm = rest[:7]
        append(
            path,
            kind="train",
            iteration=iteration,
            losses=numbers(loss_dict),
            grad_norm=None if grad_norm is None else float(grad_norm),
            learning_rate=learning_rate,
            skipped=int(skipped),
        )
        return log(loss_dict, *rest, **keywords)

    @functools.wraps(evaluate)
    def evaluate_and_record(*positional: Any, **keywords: Any) -> Any:
        result = evaluate(*positional, **keywords)
        append(path, kind="evaluate", losses=numbers(result[0]))
        return result

    training.training_log = training_log
    training.evaluate = evaluate_and_record


def numbers(losses: dict[str, Any]) -> dict[str, float]:
    return {name: float(torch.as_tensor(value)) for name, value in losses.items()}


def append(path: Path, **record: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    run(json.loads(sys.argv[1]))
