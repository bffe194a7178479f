# SPDX-License-Identifier: Apache-2.0
"""Loss and gradients of a packed sample, of its documents alone, and of the sample changed where that may not matter.

Each rank builds the product's model and datasets from a command line. A document alone lies where it lies in the
packed sample, so that it gets the same noise; everything else is padding then.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import default_collate

from megatron_csbp.data.packed_sampler import PackedSampler

Item = dict[str, Any]
CHANGED = 1
"""The document that is changed."""


class OneDocument(PackedSampler):
    """Reads one document of each packed sample, where it lies there."""

    def __init__(self, sampler: PackedSampler, which: int) -> None:
        super().__init__(sampler.dataset, sampler.padded_vocab_size)
        self.which = which

    def _documents(self, sample_index: int) -> tuple[Any, Any]:
        dataset, numbers = super()._documents(sample_index)
        return _Placed(dataset, dataset.places(numbers)[[self.which]]), numbers[[self.which]]


class _Placed:
    def __init__(self, dataset: Any, places: Any) -> None:
        self._dataset, self._places = dataset, places

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def places(self, numbers: Any) -> Any:
        return self._places


def run(request: dict[str, Any]) -> None:
    """Be one rank: write loss, tokens and gradients of each case to `gradients<rank>.pt` in `folder`.

    Args:
        request: `arguments` of a packed run, and `folder`.
    """
    from megatron.core import mpu
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.initialize import initialize_megatron

    from megatron_csbp import cpu_runtime, megatron_compat, training_setup

    sys.argv = ["probe", *request["arguments"]]
    args = training_setup.parse_and_validate_args(cpu_runtime.install("cpu"))
    megatron_compat.ensure_dataset_helpers()
    initialize_megatron()
    config = training_setup.model_config_from_args(args)
    model = config.get_builder_cls()(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    model.config.finalize_model_grads_func = lambda *models, **keywords: None  # Megatron's loop sets it
    step = training_setup.forward_step_from_args(args)
    dataset, _, _ = training_setup.datasets_provider(args)([1, 0, 0])

    def result(items: list[Item]) -> dict[str, Any]:
        model.zero_grad()
        losses, tokens = torch.zeros(()), 0
        for item in items:
            output, loss_function = step(iter([default_collate([item])]), model)
            loss, num_tokens, _ = loss_function(output)
            loss.backward()
            losses, tokens = losses + loss.detach(), tokens + int(num_tokens)
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        summed: dict[str, Any] = {"loss": losses, "tokens": torch.tensor(tokens), "gradients": gradients}
        for value in [summed["loss"], summed["tokens"], *gradients.values()]:
            dist.all_reduce(value, group=mpu.get_context_parallel_group())
        for name, parameter in model.named_parameters():
            if getattr(parameter, "sequence_parallel", False):  # its rows are spread, as Megatron's loop knows
                dist.all_reduce(gradients[name], group=mpu.get_tensor_model_parallel_group())
        return summed | {"gradients": {name: gradient.clone() for name, gradient in gradients.items()}}

    sampler, packed = dataset.sampler, dataset[0]
    places = sampler.documents(0)
    alone = []
    for which in range(len(places)):
        dataset.sampler = OneDocument(sampler, which)
        alone.append(dataset[0])
    quiet = _without_loss_of(packed, places[CHANGED])
    results = {
        "packed": result([packed]),
        "alone": result(alone),
        "padding": result([_random_padding(packed, places)]),
        "quiet": result([quiet]),
        "changed": result([_changed(quiet, places[CHANGED])]),
        "documents": len(places),
    }
    torch.save(results, Path(request["folder"]) / f"gradients{dist.get_rank()}.pt")


def _positions(item: Item) -> Tensor:
    return torch.from_numpy(np.asarray(item["plans"].rows.sample_positions))


def _random_padding(item: Item, places: Any) -> Item:
    """Put other tokens where no document is."""
    positions = _positions(item)
    inside = torch.zeros_like(positions, dtype=torch.bool)
    for start, stop in places.tolist():
        inside |= (positions >= start) & (positions < stop)
    assert not inside.all()
    return item | {"tokens": torch.where(inside, item["tokens"], 100 + positions)}


def _without_loss_of(item: Item, place: Any) -> Item:
    """Take the loss from a document's rows."""
    positions, (start, stop) = _positions(item), place.tolist()
    inside = (positions >= start) & (positions < stop)
    return item | {"loss_weights": torch.where(inside, 0.0, item["loss_weights"])}


def _changed(item: Item, place: Any) -> Item:
    """Put other tokens into a document, masked or not."""
    positions, (start, stop) = _positions(item), place.tolist()
    inside = (positions >= start) & (positions < stop)
    assert inside.any() or dist.get_world_size() > 1
    return item | {"tokens": torch.where(inside, (item["tokens"] * 7 + 3) % 180, item["tokens"])}
