# SPDX-License-Identifier: Apache-2.0
"""Every tensor of the model is in the checkpoint, with its shape, and no tensor of the checkpoint is left over.

Megatron leaves over in silence, and a missing tensor ends in a traceback of one rank. This needs a built model, so it
runs after the process groups are there, on all ranks, before anything is loaded.
"""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_csbp import megatron_checkpoints
from megatron_csbp.configuration.checkpoint_folder import Checkpoint, checkpoint_to_load, readable
from megatron_csbp.megatron_checkpoints import Expected

_SHOWN = 5


def check_weights(args: Namespace, models: Sequence[Any], pipeline_group: Any) -> None:
    """Compare the tensors of a model with those of the checkpoint that the run will load.

    Args:
        args: validated arguments.
        models: the model chunks of this pipeline stage.
        pipeline_group: ranks that hold the other stages.

    Raises:
        ValueError: they differ; the message names tensors.
    """
    checkpoint = checkpoint_to_load(args)
    if checkpoint is None or args.moe_use_upcycling or not (checkpoint.path / "metadata.json").is_file():
        return  # the legacy format has no index, and a dense model that becomes one of experts differs on purpose
    stored = readable(checkpoint, megatron_checkpoints.stored_weights)
    state = readable(checkpoint, megatron_checkpoints.common_state)
    expected = megatron_checkpoints.expected_weights(models, state, pipeline_group)
    compare_weights(checkpoint, expected, stored)


def compare_weights(
    checkpoint: Checkpoint, expected: Mapping[str, Expected], stored: Mapping[str, tuple[int, ...]]
) -> None:
    """Compare what a model asks for with what a checkpoint has, both by name.

    Raises:
        ValueError: they differ.
    """
    missing = [name for name in expected if name not in stored]
    left_over = [name for name in stored if name not in expected]
    unlike = [
        f"{name} {list(stored[name])} instead of {list(weight.shape)}"
        for name, weight in expected.items()
        if name in stored and stored[name] != weight.shape and not weight.may_grow
    ]
    faults = [
        f"{what} {', '.join(sorted(names)[:_SHOWN])}{f' and {len(names) - _SHOWN} more' * (len(names) > _SHOWN)}"
        for what, names in (("it lacks", missing), ("the model has no", left_over), ("it has", unlike))
        if names
    ]
    if faults:
        raise ValueError(
            f"{checkpoint.flag}: the weights in {checkpoint.path.name} are not those of this model: "
            f"{'; '.join(faults)}. Use the model flags of the run that wrote it."
        )
