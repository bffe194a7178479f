# SPDX-License-Identifier: Apache-2.0
"""Logits of a GPT model that the product's builder makes, or stock Megatron's, from tokens that a test chooses.

Shapes: S local rows, B micro-batch, V vocabulary.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.megatron_run import Ranks


@dataclass(frozen=True)
class Logits:
    """Logits of both copies by position, [inputs, L, V] each. Of a stock model only the clean ones exist."""

    clean: Tensor
    corrupted: Tensor


def probe(
    ranks: Ranks,
    folder: Path,
    arguments: list[str],
    clean: Tensor,
    corrupted: Tensor | None,
    world_size: int = 1,
    *,
    load: bool = False,
) -> Logits:
    """Run a model forward.

    Args:
        ranks: the server.
        folder: an empty folder.
        arguments: command line; without block-diffusion flags the model is stock Megatron's.
        clean: tokens of the clean copy, one row for each input, [inputs, L].
        corrupted: tokens of the corrupted copy, likewise; None for a stock model.
        world_size: ranks of the context group.
        load: whether the weights are those of the command line's `--load`.
    """
    torch.save({"clean": clean, "corrupted": corrupted}, folder / "tokens.pt")
    request = {"arguments": arguments, "folder": str(folder), "load": load}
    ranks.call("tests.support.model_probe:run", request, world_size).check()
    shares = [torch.load(folder / f"logits{rank}.pt") for rank in range(world_size)]
    filled = {
        copy: torch.full((*clean.shape, shares[0]["logits"].shape[-1]), torch.nan) for copy in ("clean", "corrupted")
    }
    for share in shares:
        for copy, rows in (("clean", ~share["is_corrupted"]), ("corrupted", share["is_corrupted"])):
            filled[copy][:, share["positions"][rows]] = share["logits"][:, rows]
    assert not filled["clean"].isnan().any()
    return Logits(filled["clean"], filled["corrupted"])


def run(request: dict[str, Any]) -> None:
    """Be one rank of `probe`."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.initialize import initialize_megatron

    from megatron_csbp import arguments, cpu_runtime, megatron_compat, megatron_loading, training_setup

    sys.argv = ["probe", *request["arguments"]]
    args = training_setup.parse_and_validate_args(cpu_runtime.install("cpu"))
    megatron_compat.ensure_dataset_helpers()
    initialize_megatron()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    rank = groups.cp.rank()
    if arguments.is_block_diffusion(args):
        rows = arguments.static_plans(args, rank).rows
        positions, is_corrupted = torch.from_numpy(rows.positions), torch.from_numpy(rows.is_corrupted)
        config = training_setup.model_config_from_args(args)
        mask = None
    else:
        positions = torch.arange(args.seq_length)
        is_corrupted = torch.zeros(args.seq_length, dtype=torch.bool)
        config = gpt_config_from_args(args)
        mask = torch.ones(1, 1, args.seq_length, args.seq_length).tril() < 0.5
    model = config.get_builder_cls()(config).build_model(groups).eval()
    if request["load"]:
        megatron_loading.load_weights(model)
    tokens = torch.load(Path(request["folder"]) / "tokens.pt")
    rows_BS = tokens["clean"][:, positions]
    if tokens["corrupted"] is not None:
        rows_BS = torch.where(is_corrupted, tokens["corrupted"][:, positions], rows_BS)
    with torch.no_grad():
        logits_BSV = torch.cat([model(row[None], positions[None], mask) for row in rows_BS])
    torch.save(
        {"logits": logits_BSV, "positions": positions, "is_corrupted": is_corrupted},
        Path(request["folder"]) / f"logits{rank}.pt",
    )
