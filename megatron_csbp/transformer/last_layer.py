# SPDX-License-Identifier: Apache-2.0
"""A last layer in which clean rows go no further than their keys and values.

Without a loss on the clean copy, nobody reads what the last layer makes of a clean row: only its keys and values have
readers, the corrupted rows. So the layer's attention has corrupted queries alone, and output projection, residual and
MLP see half of the rows. What the layer returns has all rows again, zero where they are clean, so pipeline shapes and
the numbers of loss rows stay as they are. Gradients are exactly those of the whole layer, where they would come to
clean rows as zeros.

The query/key/value projection is one matrix product of all rows, and often one kernel with the norm before it, so
queries of clean rows are still made (docs/adr/0013).

This is for training. In evaluation mode the layer computes all rows, for whoever wants their logits.
"""

import types
from collections.abc import Callable
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from megatron_csbp.transformer.corrupted_rows import CorruptedRows
from megatron_csbp.transformer.layer_specs import with_core_attention
from megatron_csbp.transformer.sample_params import plans_of


class LastLayer(TransformerLayer):
    """Megatron's layer, whose core attention returns corrupted rows only in training.

    Parameters, checkpoint keys and arguments are those of `TransformerLayer`.
    """

    def __init__(self, *args: Any, corrupted_rows: CorruptedRows, **kwargs: Any) -> None:
        """Build the layer.

        Args:
            *args: as for `TransformerLayer`.
            corrupted_rows: takes rows out of hidden states and puts them back.
            **kwargs: as for `TransformerLayer`.
        """
        super().__init__(*args, **kwargs)
        self._corrupted_rows = corrupted_rows
        self._static_rows = corrupted_rows.rows

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """See `TransformerLayer.forward`."""
        plans = plans_of(kwargs.get("packed_seq_params"))
        self._corrupted_rows.rows = self._static_rows if plans is None else plans.rows
        output, context = super().forward(*args, **kwargs)
        if not self.training:
            return output, context
        whole = self._corrupted_rows.put(output)
        return make_viewless_tensor(inp=whole, requires_grad=whole.requires_grad, keep_graph=True), context


def holds_last_layer(
    config: TransformerConfig, block: TransformerBlockSubmodules, vp_stage: int | None, pipeline_rank: int
) -> bool:
    """Return whether a stage's last layer is the model's, and one that `last_layer_spec` can rewrite.

    Args:
        config: Megatron's config.
        block: the layers of the stage.
        vp_stage: virtual pipeline stage, for the interleaved schedule.
        pipeline_rank: rank in the pipeline.
    """
    first = get_transformer_layer_offset(config, vp_stage, pipeline_rank)
    if not block.layer_specs or first + len(block.layer_specs) != config.num_layers:
        return False
    spec = block.layer_specs[-1]
    attends = hasattr(getattr(spec.submodules.self_attention, "submodules", None), "core_attention")
    is_stock = spec.module is TransformerLayer and isinstance(spec.submodules.self_attn_bda, types.FunctionType)
    return attends and is_stock


def last_layer_spec(spec: ModuleSpec, core_attention: Callable[..., Any], corrupted_rows: CorruptedRows) -> ModuleSpec:
    """Return a copy of a layer spec in which clean rows go, in training, no further than their keys and values.

    Args:
        spec: spec of the last layer; not changed.
        core_attention: builds the core attention that returns corrupted rows only in training.
        corrupted_rows: takes rows out of hidden states and puts them back.
    """
    spec = with_core_attention(spec, core_attention)  # a deep copy
    spec.module = LastLayer
    spec.params = {**spec.params, "corrupted_rows": corrupted_rows}
    spec.submodules.self_attn_bda = _on_corrupted_rows(spec.submodules.self_attn_bda, corrupted_rows)
    return spec


def _on_corrupted_rows(bias_dropout_add: Callable[..., Any], rows: CorruptedRows) -> Callable[..., Any]:
    """Return Megatron's add of bias and residual for an attention output that has corrupted rows only in training."""

    def build(training: bool, fused: bool) -> Callable[..., Tensor]:
        stock: Callable[..., Tensor] = bias_dropout_add(training, fused)
        if not training:
            return stock

        def add(output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            return stock(output_with_bias, rows.take(residual), dropout)

        return add

    return build
