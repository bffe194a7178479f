# SPDX-License-Identifier: Apache-2.0
"""What a Megatron checkpoint says of itself: the part of `megatron_compat` that the rules on checkpoints need.

Its symbols are in `required_symbols.REQUIRED_SYMBOLS`. Nothing here imports Megatron until it is called.
"""

import copy
import dataclasses
import functools
import inspect
import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

_OPTIMIZER_KEY = re.compile(r"(chained_\d+\.)?optimizer\.")


def common_state(path: Path) -> Mapping[str, Any]:
    """Return what a checkpoint holds beside tensors, of the `torch_dist` or the legacy `torch` format.

    Args:
        path: the folder of one iteration.

    Returns:
        `args` (a namespace), `iteration`, ...; of a legacy checkpoint the first rank's, with tensors left on disk.
    """
    from megatron.core import dist_checkpointing

    if dist_checkpointing.check_is_distributed_checkpoint(str(path)):
        state: Mapping[str, Any] = dist_checkpointing.load_common_state_dict(str(path))
        return state
    file = min(path.glob("mp_rank_0*/model_optim_rng.pt"))
    legacy: Mapping[str, Any] = torch.load(file, map_location="cpu", mmap=True, weights_only=False)
    return legacy


def sharding_type(state: Mapping[str, Any]) -> str | None:
    """How the distributed optimizer's state is cut in a checkpoint; None if it has none.

    Args:
        state: from `common_state`.
    """
    from megatron.core import dist_checkpointing

    content = dist_checkpointing.load_content_metadata(preloaded_state_dict=state) or {}
    kind: str | None = content.get("distrib_optim_sharding_type")
    return kind


def survives_resharding(kind: str) -> bool:
    """Return whether optimizer state of this sharding type loads under other tensor- and pipeline-parallel sizes."""
    from megatron.core.optimizer import distrib_optimizer as optimizer

    return kind in optimizer.DistributedOptimizer.checkpoint_fully_reshardable_formats


def least_file_bytes(path: Path) -> dict[str, int]:
    """Return, by file of a `torch_dist` checkpoint, the bytes that its index says it has at least."""
    sizes: dict[str, int] = {}
    for place in FileSystemReader(path).read_metadata().storage_data.values():
        sizes[place.relative_path] = max(sizes.get(place.relative_path, 0), place.offset + place.length)
    return sizes


def network_settings(args: Namespace) -> dict[str, Any]:
    """Return what Megatron would build the network from, by field of its configurations; nothing is built or checked.

    Args:
        args: validated arguments, of this run or out of a checkpoint.

    Returns:
        The fields that the arguments determine. How the work is divided over ranks (`ModelParallelConfig`) and what
        this Megatron does not pass on is not among them.
    """
    from megatron.core import model_parallel_config as parallel
    from megatron.core.transformer import transformer_config
    from megatron.training import argument_utils
    from megatron.training.models import gpt

    named = copy.copy(args)
    # Each of these names another class or a file; their values are compared as they are.
    apart = ("multi_latent_attention", "heterogeneous_layers_config_path", "spec", "te_precision_config_file")
    settings = {name: getattr(args, name, None) for name in apart}
    for name in (*apart, "yaml_cfg", "kitchen_config_file", "kitchen_recipe_number"):
        setattr(named, name, None)
    recorded = argument_utils.core_transformer_config_from_args(
        named, _recorder_of(transformer_config.TransformerConfig)
    )
    # `launch` puts a wrapper before it.
    gpt_config_from_args = inspect.unwrap(argument_utils.gpt_config_from_args)
    model = gpt_config_from_args(named, config=recorded, model_config_cls=_recorder_of(gpt.GPTModelConfig))
    if args.multi_latent_attention:
        fields = (field.name for field in dataclasses.fields(transformer_config.MLATransformerConfig))
        settings |= {name: getattr(args, name) for name in fields if hasattr(args, name)}
    settings |= vars(recorded) | {name: value for name, value in vars(model).items() if name != "transformer"}
    divided = {field.name for field in dataclasses.fields(parallel.ModelParallelConfig)}
    return {name: value for name, value in settings.items() if name not in divided}


def _recorder_of(config_class: type) -> type:
    """Return a subclass of a configuration class that keeps what it is given, and does not look at it."""

    def keep(self: Any, **fields: Any) -> None:
        vars(self).update(fields)

    return type(f"Recorded{config_class.__name__}", (config_class,), {"__init__": keep})


@dataclasses.dataclass(frozen=True)
class Expected:
    """A tensor that a model loads.

    Attributes:
        shape: over all ranks.
        may_grow: whether Megatron loads it from a checkpoint with another number of rows, as the padded embedding.
    """

    shape: tuple[int, ...]
    may_grow: bool


def stored_weights(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the global shape of every weight in a `torch_dist` checkpoint, without the optimizer's state."""
    entries = FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        key: tuple(entry.size)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and not _OPTIMIZER_KEY.match(key)
    }


def expected_weights(models: Sequence[Any], state: Mapping[str, Any], pipeline_group: Any) -> dict[str, Expected]:
    """Return what a model asks of a checkpoint, on all pipeline stages.

    Args:
        models: the model chunks of this stage.
        state: from `common_state`: a model names its tensors as the checkpoint's content says.
        pipeline_group: process group of the stages. All its ranks call.
    """
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as mpu
    from megatron.core import utils as unwrap
    from megatron.core.dist_checkpointing import dict_utils as utils
    from megatron.core.dist_checkpointing import mapping

    content = dict(dist_checkpointing.load_content_metadata(preloaded_state_dict=state) or {})
    content["dp_cp_group"] = mpu.get_data_parallel_group(with_context_parallel=True)
    own: dict[str, Expected] = {}
    for model in unwrap.unwrap_model(list(models)):
        tensors = model.sharded_state_dict(metadata=content)
        mapping.apply_factories(tensors)
        for tensor in utils.nested_values(tensors):
            if isinstance(tensor, mapping.ShardedTensor):
                own[tensor.key] = Expected(tuple(tensor.global_shape), tensor.allow_shape_mismatch)
    stages: list[dict[str, Expected]] = [{} for _ in range(pipeline_group.size())]
    dist.all_gather_object(stages, own, group=pipeline_group)
    return {name: weight for stage in stages for name, weight in stage.items()}


def save_clean_length() -> None:
    """Let checkpoints carry L as `seq_length`, where Megatron's schedules need the rows of both copies.

    Stock Megatron takes its own sequence length from there with `--use-checkpoint-args`.
    """
    from megatron.training import checkpointing

    stock = checkpointing.generate_state_dict
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def generate_state_dict(args: Namespace, *rest: Any, **keywords: Any) -> dict[str, Any]:
        state: dict[str, Any] = stock(args, *rest, **keywords)
        if getattr(args, "clean_seq_length", None) is not None:
            state["args"] = copy.copy(args)
            state["args"].seq_length = args.clean_seq_length
        return state

    setattr(checkpointing, "generate_state_dict", generate_state_dict)  # noqa: B010
