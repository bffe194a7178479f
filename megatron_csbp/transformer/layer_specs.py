# SPDX-License-Identifier: Apache-2.0
"""Layer specs with another core attention. The input is never changed."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any


def with_core_attention[T](spec: T, core_attention: Callable[..., Any]) -> T:
    """Return a deep copy of a layer or block spec in which every self attention has this core attention.

    Args:
        spec: a Megatron `ModuleSpec` of a layer, or `TransformerBlockSubmodules` (dense, MoE, local, Transformer
            Engine).
        core_attention: builds the module, with the keyword arguments that `megatron.core.transformer.attention`
            passes.

    Raises:
        ValueError: the spec has no core attention, so nothing would attend under the block-diffusion mask.
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
        if field.name == "core_attention":
            setattr(node, field.name, core_attention)
            replaced += 1
        else:
            replaced += _replace(getattr(node, field.name), core_attention)
    return replaced
