# SPDX-License-Identifier: Apache-2.0
"""Holds the planner's figures against a real training run: a hook of `tests.support.recorded_entry`.

Each rank writes what it measured and what the planner says of the same arguments, as JSON, beside `--csbp-ledger`.
"""

import functools
import importlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from megatron_csbp.reporting.instruments import Instruments
from megatron_csbp.tools.dry_run.packed import PackedSample, PackedSamples
from megatron_csbp.tools.memory_meter import SavedActivations
from megatron_csbp.transformer.geometry.layer_plans import LayerPlans
from megatron_csbp.transformer.geometry.sample import Sample
from tests.support.megatron_run import read_records

PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm")
"""Matrix products of linear layers, as PyTorch's counter names them; attention is a kernel of its own."""


SAVED_TOLERANCE = 0.05


def check_measured(folder: Path, size: int) -> None:
    """Compare what each rank has measured with what the planner says of it.

    Args:
        folder: of the ledger, `bytes.jsonl`, and of the measurements.
        size: number of ranks.
    """
    for rank in range(size):
        measured = json.loads((folder / f"measured{rank}.json").read_text())
        planned = measured["planned"]
        for part in ("weights", "gradients", "optimizer"):
            assert planned[part] == pytest.approx(measured[part], rel=0.01), part  # buffers are padded to whole rows
        lines = read_records(folder / f"bytes.rank{rank}.jsonl")
        assert planned["moved"] == sum(line["remote_bytes"] for line in lines if line["phase"] == "train")
        for layer, saved in measured["saved"].items():
            if layer not in planned["delta_nets"]:  # PyTorch's own kernel on a CPU keeps more than fla's
                assert planned["saved"][layer] == pytest.approx(saved, rel=SAVED_TOLERANCE), layer
                assert planned["products"][layer] == measured["products"][layer], layer


def measure() -> None:
    """Measure the first iteration: what layers save, and at its end weights, gradient buffers and optimizer."""
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from megatron.training import training

    measured: dict[str, Any] = {"saved": {}, "products": {}}
    samples: list[Sample] = []
    forward, train_step, before = TransformerLayer.forward, training.train_step, Instruments.before_micro_batch

    @functools.wraps(before)
    def see(instruments: Any, model: Any, args: Any, plans: LayerPlans) -> None:
        samples.append(plans.rows.sample)
        before(instruments, model, args, plans)

    @functools.wraps(forward)
    def count(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if str(layer.layer_number) in measured["saved"] or not layer.training:
            return forward(layer, *args, **kwargs)
        with SavedActivations() as saved, FlopCounterMode(display=False) as counter:
            result = forward(layer, *args, **kwargs)
        held = {tensor.untyped_storage()._cdata for tensor in layer.parameters()}
        kept = {key: size for key, size in saved.storages.items() if key not in held}
        measured["saved"][str(layer.layer_number)] = sum(kept.values())
        products = {str(name): number for name, number in counter.get_flop_counts()["Global"].items()}
        measured["products"][str(layer.layer_number)] = sum(products.get(name, 0) for name in PRODUCTS)
        return result

    @functools.wraps(train_step)
    def step(forward_step: Any, data: Any, model: Any, optimizer: Any, *rest: Any, **options: Any) -> Any:
        result = train_step(forward_step, data, model, optimizer, *rest, **options)
        if "weights" not in measured:
            measured.update(_states(model, optimizer))
            measured["planned"] = _planned(samples[0])
            ledger = Path(importlib.import_module("megatron.training").get_args().csbp_ledger)
            ledger.with_name(f"measured{os.environ['RANK']}.json").write_text(json.dumps(measured))
        return result

    Instruments.before_micro_batch = see  # type: ignore[method-assign]
    TransformerLayer.forward = count
    training.train_step = step


def _states(models: list[nn.Module], optimizer: Any) -> dict[str, int]:
    """Return the bytes of weights, of the gradient buffers under them, and of the optimizer's tensors."""
    buffers = {}
    for model in models:
        for buffer in (*model.buffers, *model.expert_parallel_buffers):
            buffers[buffer.grad_data.untyped_storage()._cdata] = buffer.grad_data.nbytes
    weights = {parameter for model in models for parameter in model.parameters()}
    inner = getattr(optimizer, "chained_optimizers", [optimizer])
    held: dict[int, int] = {}
    for one in inner:
        for group in one.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in weights:  # a copy in fp32
                    held[id(parameter)] = parameter.nbytes
        for state in one.optimizer.state.values():
            held.update(
                {id(value): value.nbytes for value in state.values() if isinstance(value, Tensor) and value.dim()}
            )
    return {
        "weights": sum(parameter.nbytes for parameter in weights),
        "gradients": sum(buffers.values()),
        "optimizer": sum(held.values()),
    }


def _planned(sample: Sample) -> dict[str, Any]:
    """Return what is planned of this rank; of packed documents, for the sample that the rank has seen."""
    from megatron.core import parallel_state
    from megatron.training import get_args

    from megatron_csbp import training_setup
    from megatron_csbp.tools.dry_run import activations, memory, operations
    from megatron_csbp.tools.dry_run.from_args import job_from_args
    from megatron_csbp.tools.dry_run.traffic import layer_traffic

    args = get_args()
    job = job_from_args(args, training_setup.model_config_from_args(args).transformer, [])
    rank = parallel_state.get_context_parallel_rank()
    seen = PackedSample(sample, job.loss_rows, job.most_loss_rows)
    job = replace(job, rank=rank, packed=None if job.packed is None else PackedSamples(1, seen, seen))
    stage = parallel_state.get_pipeline_model_parallel_rank()
    layers, products = {}, {}
    moved = 0
    for index, layer in job.stage_layers(stage):
        recomputed = job.recompute.takes_layer(index)
        layers[str(layer.number)] = activations.saved_by_layer(job, layer)
        executed = operations.mixer_operations(job, layer) + operations.mlp_operations(job, layer)
        products[str(layer.number)] = executed
        moved += layer_traffic(job, layer, recomputed).context * job.micro_batches
    delta_nets = [str(layer.number) for layer in job.network.layers if not layer.attends]
    found = {"saved": layers, "products": products, "moved": moved, "delta_nets": delta_nets}
    return found | memory.state_bytes(job, stage)


def plan(request: dict[str, Any]) -> None:
    """Run the planner's command on a rank of a forked world, and leave with its exit status.

    Args:
        request: `arguments` of the command.
    """
    import sys

    from megatron_csbp import dry_run

    sys.argv = ["dry_run", *request["arguments"]]
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    dry_run.main()


def plan_recipes(request: dict[str, Any]) -> None:
    """Plan all recipes in this one process, and write their plans and the lines of the table.

    Args:
        request: `result`: file to write JSON to.
    """
    from examples import plan_table

    found = {}
    for recipe, planned in plan_table.plans():
        name = f"{recipe.model.folder}/{recipe.path.stem}"
        found[name] = {"plan": planned, "row": plan_table.row(recipe, planned)}
    Path(request["result"]).write_text(json.dumps(found))
