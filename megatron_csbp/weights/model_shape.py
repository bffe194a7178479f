# SPDX-License-Identifier: Apache-2.0
"""The sizes of a model, as far as its tensors' shapes depend on them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DENSE, EXPERTS = "dense", "experts"
FULL_ATTENTION, DELTA_NET = "full attention", "gated delta net"


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder.

    Attributes:
        dims: sizes by name: `hidden`, `ffn`, `queries`, `keys` (rows of the projections), `head`, `vocab` (rows in
            Hugging Face's embedding), `padded_vocab` (in Megatron's), `experts`, `expert_ffn`; see also
            `_linear_dims`.
        layer_kinds: for each layer, its kinds; a rule of `families` may be for layers of one kind only.
        tied: one tensor is embedding and output layer.
    """

    dims: Mapping[str, int]
    layer_kinds: tuple[frozenset[str], ...]
    tied: bool

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layer_kinds)

    @property
    def uniform(self) -> bool:
        """All layers are alike: Megatron then keeps a tensor of all layers in one, the layers being its first dim."""
        return len(set(self.layer_kinds)) <= 1

    def shape(self, names: str) -> tuple[int, ...]:
        """Return the shape whose dims have these names, for example `queries hidden`."""
        return tuple(self.dims[name] for name in names.split())


def shape_from_arguments(arguments: Mapping[str, Any], vocab: int) -> ModelShape:
    """Return the sizes that Megatron's arguments describe.

    Args:
        arguments: by name (`num_layers`), from a checkpoint or from `model_arguments.arguments_from_config`.
        vocab: rows of Hugging Face's embedding.
    """
    heads, head = arguments["num_attention_heads"], arguments["kv_channels"]
    experts = arguments.get("num_experts") or 0
    grouped = arguments.get("group_query_attention")
    dims = {
        "hidden": arguments["hidden_size"],
        "ffn": arguments["ffn_hidden_size"],
        "queries": heads * head,
        "keys": (arguments["num_query_groups"] if grouped else heads) * head,
        "head": head,
        "vocab": vocab,
        "padded_vocab": arguments["padded_vocab_size"],
        "experts": experts,
        "expert_ffn": arguments.get("moe_ffn_hidden_size") or arguments["ffn_hidden_size"],
    }
    kinds = [
        frozenset([EXPERTS if expert else DENSE, DELTA_NET if linear else FULL_ATTENTION])
        for expert, linear in zip(_expert_layers(arguments, bool(experts)), linear_layers(arguments), strict=True)
    ]
    if arguments.get("attention_output_gate"):
        dims["gated_queries"] = 2 * dims["queries"]
    if any(DELTA_NET in kind for kind in kinds):
        dims |= _linear_dims(arguments)
    return ModelShape(dims, tuple(kinds), not arguments["untie_embeddings_and_output_weights"])


def _linear_dims(arguments: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of a gated delta net: rows of its projections, heads, and taps of its convolution."""
    keys = arguments["linear_num_key_heads"] * arguments["linear_key_head_dim"]
    values = arguments["linear_num_value_heads"] * arguments["linear_value_head_dim"]
    return {
        "linear_keys": keys,
        "linear_values": values,
        "linear_channels": 2 * keys + values,
        "linear_heads": arguments["linear_num_value_heads"],
        "linear_value_head": arguments["linear_value_head_dim"],
        "taps": arguments["linear_conv_kernel_dim"],
        "one": 1,
    }


def linear_layers(arguments: Mapping[str, Any]) -> list[bool]:
    """Say for each layer whether it is a gated delta net, as `--linear-attention-freq` counts them."""
    count, frequency = arguments["num_layers"], arguments.get("linear_attention_freq")
    if arguments.get("experimental_attention_variant") != "gated_delta_net" or frequency is None:
        return [False] * count
    if isinstance(frequency, int):
        return [(layer + 1) % frequency != 0 for layer in range(count)]
    return [bool(linear) for linear in frequency]


def _expert_layers(arguments: Mapping[str, Any], has_experts: bool) -> list[bool]:
    """Say for each layer whether it has experts, as `--moe-layer-freq` counts them."""
    count, frequency = arguments["num_layers"], arguments.get("moe_layer_freq", 1)
    if not has_experts:
        return [False] * count
    if isinstance(frequency, int):
        return [layer % frequency == 0 for layer in range(count)]
    return [bool(expert) for expert in frequency]
