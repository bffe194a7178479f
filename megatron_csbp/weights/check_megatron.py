# SPDX-License-Identifier: Apache-2.0
"""Logits of a Megatron checkpoint, computed by Megatron's GPT model with one layer's weights in memory at a time.

The model is built from flags as in a training run, and says itself under which keys it looks for its parameters.

Shapes: B prompts, S tokens, H hidden, V vocabulary.
"""

import contextlib
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_csbp import cpu_runtime
from megatron_csbp.one_process import be_the_only_rank
from megatron_csbp.weights.check_hugging_face import Computed
from megatron_csbp.weights.model_flags import flags_of_arguments, yaml_text
from megatron_csbp.weights.torch_dist_reader import TorchDistCheckpoint


def megatron_logits(path: Path, arguments: Mapping[str, Any], tokens_BS: Tensor) -> Computed:
    """Compute logits in fp32 on the CPU.

    Args:
        path: folder of an iteration.
        arguments: Megatron's arguments of the model, by name.
        tokens_BS: token ids.
    """
    # Megatron's own model does not scale queries, and below the original length the scale is 1.
    original: int = arguments.get("yarn_original_max_position_embeddings") or 0
    if "query_scale_beta" in arguments and tokens_BS.shape[1] > original:
        raise ValueError(
            f"--prompt: {tokens_BS.shape[1]} tokens are too many, since queries of this model are scaled from "
            "position "
            f"{original} on; compare on shorter ones."
        )
    arguments = {name: value for name, value in arguments.items() if name != "query_scale_beta"}
    with contextlib.redirect_stdout(sys.stderr):
        model = _build(arguments, tokens_BS.shape[1])
    weights = TorchDistCheckpoint(path)
    entries = model.sharded_state_dict()
    parameters = dict(model.named_parameters())
    hidden: dict[int, Tensor] = {}
    in_layers: set[str] = set()
    for number, layer in enumerate(model.decoder.layers):
        prefix = f"decoder.layers.{number}."
        own = [name for name in parameters if name.startswith(prefix)]
        in_layers.update(own)
        _load_when_used(layer, number, {name: (parameters[name], entries[name]) for name in own}, weights, hidden)
    for name, parameter in parameters.items():
        if name not in in_layers:
            parameter.data = _read(entries[name], weights)
    length = tokens_BS.shape[1]
    mask = torch.ones(1, 1, length, length).tril() < 0.5
    positions_BS = torch.arange(length).expand(tokens_BS.shape)
    with torch.no_grad():
        return Computed(model(tokens_BS, positions_BS, mask).float(), hidden)


def _build(arguments: Mapping[str, Any], length: int) -> Any:
    """Build the model without weights: memory that nobody touches is not taken."""
    runtime = cpu_runtime.install("cpu")
    with _as_command_line(arguments, length):
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.training.argument_utils import gpt_config_from_args

        from megatron_csbp import megatron_compat, megatron_loading, training_setup

        megatron_compat.ensure_dataset_helpers()
        config = gpt_config_from_args(training_setup.parse_and_validate_args(runtime))
        megatron_loading.initialize_megatron()
        groups = ProcessGroupCollection.use_mpu_process_groups()
        return config.get_builder_cls()(config).build_model(groups).eval()


@contextlib.contextmanager
def _as_command_line(arguments: Mapping[str, Any], length: int) -> Iterator[None]:
    """Make the arguments this process's command line, and the process a job of one rank."""
    run = (
        f"--seq-length {length} --tokenizer-type NullTokenizer --vocab-size {arguments['padded_vocab_size'] - 1} "
        "--no-initialization --mock-data --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1 "
        "--eval-iters 0 --eval-interval 1 --transformer-impl local"
    )
    before = sys.argv
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.yaml"
        file.write_text(yaml_text("", {"model": flags_of_arguments(arguments)}))
        sys.argv = [before[0], "--yaml-cfg", str(file), *run.split()]
        be_the_only_rank()
        try:
            yield
        finally:
            sys.argv = before


def _load_when_used(
    layer: nn.Module,
    number: int,
    parameters: Mapping[str, tuple[nn.Parameter, Any]],
    weights: TorchDistCheckpoint,
    hidden_BSH: dict[int, Tensor],
) -> None:
    """Give a layer its weights right before it runs, and take them away after."""

    def load(*_: Any) -> None:
        for parameter, entry in parameters.values():
            parameter.data = _read(entry, weights)

    def drop(module: nn.Module, _: Any, output: Any) -> None:
        hidden_BSH[number] = (output[0] if isinstance(output, tuple) else output).transpose(0, 1)
        for parameter, _entry in parameters.values():
            parameter.data = torch.empty(0)

    layer.register_forward_pre_hook(load)
    layer.register_forward_hook(drop)


def _read(entry: Any, weights: TorchDistCheckpoint) -> Tensor:
    """Read a parameter in fp32.

    Args:
        entry: Megatron's `ShardedTensor`, or the factory of several that lie below each other.
        weights: the checkpoint.
    """
    if hasattr(entry, "build"):
        return torch.cat([_read(part, weights) for part in entry.build()])
    leading = (1,) * entry.prepend_axis_num
    return weights.read(entry.key, entry.global_offset, leading + entry.local_shape).reshape(entry.local_shape).float()
