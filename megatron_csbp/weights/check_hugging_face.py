# SPDX-License-Identifier: Apache-2.0
"""Logits of a Hugging Face model, computed by `transformers` with one layer's weights in memory at a time.

Shapes: B prompts, S tokens, H hidden, V vocabulary.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megatron_csbp.weights.importing import Source
from megatron_csbp.weights.rules import Piece, Scope, pieces


@dataclass
class Computed:
    """What a model computed.

    Attributes:
        logits_BSV: fp32.
        hidden_BSH: what each layer returned, by layer.
    """

    logits_BSV: Tensor
    hidden_BSH: dict[int, Tensor] = field(default_factory=dict)


def hugging_face_logits(source: Source, tokens_BS: Tensor) -> Computed:
    """Compute logits in fp32 on the CPU.

    Args:
        source: the model.
        tokens_BS: token ids.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    entries = {key: value for key, value in source.config.items() if key not in ("model_type", "auto_map")}
    config = AutoConfig.for_model(source.family.transformers_type, **entries)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    decoder = model.model
    decoder.rotary_emb = type(decoder.rotary_emb)(config)  # its tables are computed, not loaded
    by_layer: dict[int | None, list[Piece]] = defaultdict(list)
    for piece in pieces(source.family.rules, source.family.body, source.shape):
        by_layer[piece.layer].append(piece)
    model.load_state_dict(_tensors(source, by_layer[None], ""), strict=False, assign=True)
    model.tie_weights()
    hidden: dict[int, Tensor] = {}
    for number, layer in enumerate(decoder.layers):
        _load_when_used(layer, number, source, by_layer[number], hidden)
    with torch.no_grad():
        return Computed(model(tokens_BS, use_cache=False).logits, hidden)


def _load_when_used(
    layer: nn.Module, number: int, source: Source, parts: list[Piece], hidden_BSH: dict[int, Tensor]
) -> None:
    """Give a layer its weights right before it runs, and take them away after."""

    def load(module: nn.Module, _: Any) -> None:
        prefix = f"{source.family.transformers_body}layers.{number}."
        module.load_state_dict(_tensors(source, parts, prefix), strict=True, assign=True)

    def drop(module: nn.Module, _: Any, output: Any) -> None:
        hidden_BSH[number] = output[0] if isinstance(output, tuple) else output
        module.to("meta")

    layer.register_forward_pre_hook(load)
    layer.register_forward_hook(drop)


def _tensors(source: Source, parts: list[Piece], prefix: str) -> dict[str, Tensor]:
    """Return the tensors of some pieces in fp32, under the names that `transformers` has below a prefix."""
    family = source.family
    tensors: dict[str, Tensor] = {}
    experts: dict[str, list[Tensor]] = defaultdict(list)
    for piece in parts:
        read = [source.tensors.read(name).float() for name in piece.names]  # all rows, whichever are in the piece
        if piece.rule.in_transformers is not None:
            experts[piece.rule.in_transformers].append(piece.rule.layout.pack(read, source.shape))
            continue
        for name, tensor in zip(piece.names, read, strict=True):
            theirs = family.transformers_head if name == family.head else _renamed(name, piece, source)
            tensors[theirs.removeprefix(prefix)] = tensor
    return tensors | {name: torch.stack(each) for name, each in experts.items()}


def _renamed(name: str, piece: Piece, source: Source) -> str:
    assert piece.rule.scope is not Scope.EXPERT
    return source.family.transformers_body + name.removeprefix(source.family.body)
