# SPDX-License-Identifier: Apache-2.0
"""Layer specs of models with gated delta nets: this package's layer in place of Megatron's, and a local spec."""

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_csbp import megatron_delta_net
from megatron_csbp.transformer.core_attention import BlockDiffusionSettings, CSBPCoreAttention
from megatron_csbp.transformer.delta_net.layer import BlockDiffusionGatedDeltaNet


def with_delta_net[T](spec: T, settings: BlockDiffusionSettings) -> T:
    """Return a deep copy of a layer or block spec in which every gated delta net is this package's.

    Args:
        spec: a Megatron `ModuleSpec` of a layer, or `TransformerBlockSubmodules`.
        settings: of the run.

    Raises:
        ValueError: the spec has a gated delta net of somebody else's, which would be lost.
    """
    spec = copy.deepcopy(spec)
    for node in _module_specs(spec, set()):
        if isinstance(node.module, type) and issubclass(node.module, GatedDeltaNet):
            if node.module not in (GatedDeltaNet, BlockDiffusionGatedDeltaNet):
                raise ValueError(
                    f"--spec has layers {node.module.__name__}, which do not know the copies of a sequence: with "
                    "--diffusion-block-size corrupted blocks start from the clean state before them. Use a spec with "
                    "Megatron's GatedDeltaNet."
                )
            node.module = BlockDiffusionGatedDeltaNet
            node.params = {**node.params, "settings": settings}
    return spec


def _module_specs(node: Any, seen: set[int]) -> Iterator[ModuleSpec]:
    """Yield every module spec once, below lists and dataclasses; specs and submodules are dataclasses."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, list | tuple):
        for child in node:
            yield from _module_specs(child, seen)
    if not dataclasses.is_dataclass(node) or isinstance(node, type):
        return
    if isinstance(node, ModuleSpec):
        yield node
    for field in dataclasses.fields(node):
        yield from _module_specs(getattr(node, field.name), seen)


def local_hybrid_spec(config: Any, vp_stage: int | None, pipeline_rank: int) -> TransformerBlockSubmodules:
    """Return the layers of one pipeline stage without Transformer Engine, which Megatron's own builder insists on.

    Args:
        config: Megatron's `TransformerConfig` with `experimental_attention_variant="gated_delta_net"`.
        vp_stage: virtual pipeline stage, for the interleaved schedule.
        pipeline_rank: rank in the pipeline.
    """
    dense = copy.copy(config)
    dense.experimental_attention_variant = None
    block = megatron_delta_net.local_block_of_all_layers(dense)
    pattern = megatron_delta_net.delta_net_pattern(config)
    for layer, has_delta_net in enumerate(pattern):
        if has_delta_net:
            block.layer_specs[layer] = _delta_net_layer(block.layer_specs[layer])
    here = megatron_delta_net.layers_of_stage(config, vp_stage, pipeline_rank)
    block.layer_specs = [block.layer_specs[layer] for layer in here]
    return block


def _delta_net_layer(attention_layer: ModuleSpec) -> ModuleSpec:
    """Return a copy of a local layer spec with a gated delta net in place of its self attention."""
    spec = copy.deepcopy(attention_layer)
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    layer.self_attention = ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=attention.linear_qkv, out_norm=layer.input_layernorm, out_proj=attention.linear_proj
        ),
    )
    # Checkpoint keys are those of Transformer Engine's layer, whose projection holds the norm.
    layer.sharded_state_dict_keys_map = {
        **layer.sharded_state_dict_keys_map,
        "input_layernorm.": "self_attention.in_proj.layer_norm_",
    }
    return spec


def check_mixers(model: GPTModel) -> None:
    """Check that nothing in a model mixes rows except what knows the copies of a sequence.

    Args:
        model: a GPT stage.

    Raises:
        ValueError: a layer mixes rows in another way, and would see corrupted rows of other blocks.
    """
    for layer in model.decoder.layers:
        for name in ("self_attention", "cross_attention", "mixer"):
            mixer = getattr(layer, name, None)
            allowed = mixer is None or isinstance(mixer, IdentityOp | BlockDiffusionGatedDeltaNet)
            if not allowed and not isinstance(getattr(mixer, "core_attention", None), CSBPCoreAttention):
                raise ValueError(
                    f"--spec puts {type(mixer).__name__} into layer {layer.layer_number}, which does not know the "
                    "copies of a sequence: with --diffusion-block-size rows would see what they must not. Use a spec "
                    "with self attention or Megatron's GatedDeltaNet."
                )
