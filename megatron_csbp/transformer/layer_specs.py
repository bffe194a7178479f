# SPDX-License-Identifier: Apache-2.0
"""Layer specs with another core attention. The input is never changed."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from megatron.core.ssm.gated_delta_net import GatedDeltaNet


def with_core_attention[T](spec: T, core_attention: Callable[..., Any]) -> T:
    """Return a deep copy of a layer or block spec in which every self attention has this core attention.

    Gated delta nets stay; see `delta_net.layer_specs`.

    Args:
        spec: a Megatron `ModuleSpec` of a layer, or `TransformerBlockSubmodules` (dense, MoE, local, Transformer
            Engine).
        core_attention: builds the module, with the keyword arguments that `megatron.core.transformer.attention`
            passes.

    Raises:
        ValueError: the spec has neither core attention nor gated delta nets, so nothing would know the copies of a
            sequence.
    """
    spec = copy.deepcopy(spec)
    if not _replace(spec, core_attention):
        raise ValueError(f"no core attention in layer spec {spec!r}; use a GPT layer spec with self attention.")
    return spec


def _replace(node: Any, core_attention: Callable[..., Any]) -> int:
    """Replace in place, below lists and dataclasses (specs and submodules are dataclasses); return how many."""
    if isinstance(node, list | tuple):
        return sum(_replace(child, core_attention) for child in node)
    if not dataclasses.is_dataclass(node) or isinstance(node, type):
        return 0
    replaced = 0
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if field.name == "core_attention":
            setattr(node, field.name, core_attention)
            replaced += 1
        elif isinstance(value, type) and issubclass(value, GatedDeltaNet):
            replaced += 1
        else:
            replaced += _replace(value, core_attention)
    return replaced
