# SPDX-License-Identifier: Apache-2.0
"""Logits of a Megatron checkpoint, computed by Megatron's GPT model with one layer's weights in memory at a time.

The model is built from flags as in a training run, and says itself under which keys it looks for its parameters.

Shapes: B prompts, S tokens, R rows, H hidden, V vocabulary.
"""

import contextlib
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_csbp import cpu_runtime
from megatron_csbp.one_process import be_the_only_rank
from megatron_csbp.weights.check_hugging_face import Computed
from megatron_csbp.weights.model_flags import flags_of_arguments, yaml_text
from megatron_csbp.weights.torch_dist_reader import TorchDistCheckpoint

_CLEAN_IS_AUTOREGRESSIVE = "--diffusion-block-size 1 --clean-attention token-causal --mask-token-id"


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
        model, rows = _build(arguments, tokens_BS.shape[1])
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
    with torch.no_grad():
        logits_BRV = model(tokens_BS[:, rows.positions_R], rows.positions_R.expand(len(tokens_BS), -1), rows.mask)
    clean = {number: hidden_BRH[:, rows.clean_R] for number, hidden_BRH in hidden.items()}
    return Computed(logits_BRV[:, rows.clean_R].float(), clean)


@dataclass(frozen=True)
class _Rows:
    """What the rows of the model are.

    Attributes:
        positions_R: position of each.
        clean_R: bool; the rows that are an autoregressive model's.
        mask: of the attention; None if the layers know it themselves.
    """

    positions_R: Tensor
    clean_R: Tensor
    mask: Tensor | None


def _build(arguments: Mapping[str, Any], length: int) -> tuple[Any, _Rows]:
    """Build the model without weights: memory that nobody touches is not taken.

    Megatron's own gated delta nets need Transformer Engine and a GPU. So such a model is built with this package's, as
    for block diffusion with clean rows that see only earlier ones: these are the autoregressive model's.
    """
    runtime = cpu_runtime.install("cpu")
    has_delta_nets = arguments.get("experimental_attention_variant") is not None
    # The last row of the vocabulary is no token of the command line's tokenizer.
    copies = f"{_CLEAN_IS_AUTOREGRESSIVE} {arguments['padded_vocab_size'] - 1}" if has_delta_nets else ""
    with _as_command_line(arguments, length, copies):
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.training.argument_utils import gpt_config_from_args

        from megatron_csbp import megatron_compat, megatron_loading, training_setup
        from megatron_csbp.arguments import static_plans

        megatron_compat.ensure_dataset_helpers()
        args = training_setup.parse_and_validate_args(runtime)
        if has_delta_nets:
            held = static_plans(args, rank=0).rows
            rows = _Rows(torch.from_numpy(held.positions), torch.from_numpy(~held.is_corrupted), None)
            config = training_setup.model_config_from_args(args)
        else:
            mask = torch.ones(1, 1, length, length).tril() < 0.5
            rows = _Rows(torch.arange(length), torch.ones(length, dtype=torch.bool), mask)
            config = gpt_config_from_args(args)
        megatron_loading.initialize_megatron()
        groups = ProcessGroupCollection.use_mpu_process_groups()
        return config.get_builder_cls()(config).build_model(groups).eval(), rows


@contextlib.contextmanager
def _as_command_line(arguments: Mapping[str, Any], length: int, more: str) -> Iterator[None]:
    """Make the arguments this process's command line, and the process a job of one rank."""
    run = (
        f"--seq-length {length} --tokenizer-type NullTokenizer --vocab-size {arguments['padded_vocab_size'] - 2} "
        "--no-initialization --mock-data --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1 "
        f"--eval-iters 0 --eval-interval 1 --transformer-impl local {more}"
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
