# SPDX-License-Identifier: Apache-2.0
"""A value for Megatron's `--spec`: its local layers, with norms that allow sequence parallelism."""

from typing import Any

from megatron.training.models.gpt import default_layer_spec

from megatron_csbp import megatron_compat
from megatron_csbp.transformer.norm import with_sequence_parallel_norm


def block_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Return the block spec of this pipeline stage for a `GPTModelConfig`."""
    layers = default_layer_spec(config, vp_stage)
    return with_sequence_parallel_norm(megatron_compat.block_submodules(config.transformer, layers, vp_stage))
