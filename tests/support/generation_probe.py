# SPDX-License-Identifier: Apache-2.0
"""Text written by a checkpoint, with the logits of every pass over a block, as facts for a test to judge."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.megatron_run import Ranks


def generate(ranks: Ranks, folder: Path, arguments: list[str], world_size: int = 1) -> list[dict[str, Any]]:
    """Run `megatron_csbp.generate`'s session.

    Args:
        ranks: the server.
        folder: an empty folder.
        arguments: command line.
        world_size: tensor-parallel ranks.

    Returns:
        Of each rank: `prompts`; and for each of them `tokens`, the new ones, and `passes`, the calls of the model's
        `append` and `denoise`, each with `kind`, `start`, `tokens` and `logits`.
    """
    request = {"arguments": arguments, "folder": str(folder)}
    ranks.call("tests.support.generation_probe:run", request, world_size).check()
    return [torch.load(folder / f"generated{rank}.pt") for rank in range(world_size)]


def run(request: dict[str, Any]) -> None:
    """Be one rank of `generate`."""
    from megatron_csbp import cpu_runtime
    from megatron_csbp.generation.session import Session, parse_arguments

    sys.argv = ["probe", *request["arguments"]]
    session = Session.open(parse_arguments(cpu_runtime.install("cpu")))
    recorded = record_passes(session.model)
    facts: dict[str, Any] = {"prompts": session.prompts, "tokens": [], "passes": []}
    for prompt in session.prompts:
        recorded.clear()
        facts["tokens"].append(session.write(prompt).tokens)
        facts["passes"].append(list(recorded))
    torch.save(facts, Path(request["folder"]) / f"generated{session.args.rank}.pt")


def record_passes(model: Any) -> list[dict[str, Any]]:
    """Note every call of a model from now on."""
    passes: list[dict[str, Any]] = []
    for name in ("append", "denoise"):
        stock = getattr(model, name)

        def recorded(tokens: Sequence[int], name: str = name, stock: Any = stock) -> Tensor:
            start = model._prefix_length
            logits: Tensor = stock(tokens)
            passes.append({"kind": name, "start": start, "tokens": list(tokens), "logits": logits.clone()})
            return logits

        setattr(model, name, recorded)
    return passes
