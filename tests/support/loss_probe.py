# SPDX-License-Identifier: Apache-2.0
"""The forward step's loss of a batch that a test chooses, and the same from all logits, by hand, in fp64.

Shapes: S local rows, B micro-batch, V vocabulary.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def run(request: dict[str, Any]) -> None:
    """Be one rank: write `loss`, `num_tokens`, `reports` and `by_hand` to the file `result`.

    Args:
        request: `arguments` of a block-diffusion run on one context rank, `batch`: the lists that a dataset would
            yield, `evaluate`, and `result`.
    """
    from megatron.core import mpu
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.initialize import initialize_megatron

    from megatron_csbp import arguments, cpu_runtime, megatron_compat, training_setup

    sys.argv = ["probe", *request["arguments"]]
    args = training_setup.parse_and_validate_args(cpu_runtime.install("cpu"))
    megatron_compat.ensure_dataset_helpers()
    initialize_megatron()
    config = training_setup.model_config_from_args(args)
    model = config.get_builder_cls()(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    model.train(not request["evaluate"])
    batch = {name: torch.tensor(values) for name, values in request["batch"].items()}
    rows = arguments.static_plans(args, 0).rows
    positions = torch.from_numpy(rows.positions.copy())
    batch["position_ids"] = positions.expand_as(batch["tokens"]).contiguous()
    model.config.finalize_model_grads_func = lambda *models, **keywords: None  # Megatron's loop sets it
    step = training_setup.forward_step_from_args(args)
    output, loss_function = step(iter([batch]), model)
    loss, num_tokens, reports = loss_function(output)
    with torch.no_grad():
        shard_BSV = model(batch["tokens"], batch["position_ids"], None)
    shards = [torch.empty_like(shard_BSV) for _ in range(mpu.get_tensor_model_parallel_world_size())]
    dist.all_gather(shards, shard_BSV.contiguous(), group=mpu.get_tensor_model_parallel_group())
    is_corrupted = torch.from_numpy(rows.is_corrupted)
    excluded = args.mask_token_id if args.diffusion_objective == "block-diffusion" else None
    by_hand = losses_by_hand(torch.cat(shards, -1).double(), batch, is_corrupted, excluded)
    if dist.get_rank() == dist.get_world_size() - 1:
        result = {
            "loss": loss.item(),
            "num_tokens": num_tokens.item(),
            "reports": {name: value.tolist() for name, value in reports.items()},
            "by_hand": by_hand,
            "rows": output.numel(),
        }
        Path(request["result"]).write_text(json.dumps(result))


def losses_by_hand(
    logits_BSV: Tensor, batch: dict[str, Tensor], is_corrupted: Tensor, excluded: int | None
) -> dict[str, float]:
    """Return the weighted sums of cross-entropies over the corrupted and over the clean rows."""
    sums = {"corrupted": 0.0, "clean": 0.0}
    for sequence in range(logits_BSV.shape[0]):
        for row in range(logits_BSV.shape[1]):
            logits_V = logits_BSV[sequence, row].clone()
            target = int(batch["labels"][sequence, row])
            if is_corrupted[row] and excluded is not None and target != excluded:
                logits_V[excluded] = -torch.inf
            weight = float(batch["loss_weights"][sequence, row])
            if weight:
                entropy = (logits_V.logsumexp(0) - logits_V[target]).item()
                sums["corrupted" if is_corrupted[row] else "clean"] += weight * entropy
    return sums
