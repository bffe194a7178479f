# SPDX-License-Identifier: Apache-2.0
"""Every touch of a Megatron symbol that is not public API, for models with gated delta nets.

See `megatron_csbp.megatron_compat`; the symbols are in the same table. Nothing here imports Megatron until it is
called.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor


@contextlib.contextmanager
def gated_delta_net_without_fla() -> Iterator[None]:
    """While open, Megatron's gated delta net can be built where the package fla is missing, whose kernels it calls."""
    from megatron.core.ssm.gated_delta_net import common

    before = common.HAVE_FLA
    common.HAVE_FLA = True
    try:
        yield
    finally:
        common.HAVE_FLA = before


def delta_net_pattern(config: Any) -> list[int]:
    """Return, for each layer of a model, 1 if it is a gated delta net and 0 if it is full attention."""
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs

    pattern: list[int] = specs.get_linear_attention_pattern(config=config)
    return pattern


def attention_layers(config: Any) -> list[int]:
    """Return the numbers, from 1, of the layers that attend; all but the gated delta nets.

    Args:
        config: Megatron's `TransformerConfig` or its arguments.
    """
    numbers = range(1, config.num_layers + 1)
    if getattr(config, "experimental_attention_variant", None) != "gated_delta_net":
        return list(numbers)
    return [number for number, is_linear in zip(numbers, delta_net_pattern(config), strict=True) if not is_linear]


def local_block_of_all_layers(config: Any) -> Any:
    """Return the spec of all layers of a model, with full attention, by Megatron's local modules."""
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer import transformer_block as block

    layers = specs.get_gpt_decoder_layer_specs(
        config,
        use_transformer_engine=False,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
    )
    norm = layers[0].submodules.input_layernorm
    return block.TransformerBlockSubmodules(layer_specs=list(layers), layer_norm=norm)


def layers_of_stage(config: Any, vp_stage: int | None, pipeline_rank: int) -> list[int]:
    """Return the layers, from 0, that a pipeline stage builds."""
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        from megatron.core.transformer.enums import LayerType

        kind = LayerType.decoder
        return list(layout.get_layer_id_list(layer_type=kind, vp_stage=vp_stage, pp_rank=pipeline_rank))
    from megatron.core.transformer import transformer_block as block
    from megatron.core.transformer import transformer_layer as layer

    first = layer.get_transformer_layer_offset(config, vp_stage, pipeline_rank)
    return list(range(first, first + block.get_num_layers_to_build(config, vp_stage, pipeline_rank)))


def heads_from_rows(features: Tensor, sections: tuple[int, ...], group: Any) -> Tensor:
    """Return all ranks' rows, rank by rank, of this rank's share of the heads, by Megatron's all-to-all.

    Args:
        features: [rows, batch, features].
        sections: widths of the parts of the features, each of which is cut into shares.
        group: the context group.

    Returns:
        [P rows, batch, features / P].
    """
    from megatron.core.ssm.gated_delta_net import common

    order = common._build_head_perm_for_split_sections(sections, group.size(), features.device)
    rows: Tensor = common.tensor_a2a_cp2hp(
        features.index_select(-1, order),
        seq_dim=0,
        head_dim=-1,
        cp_group=group,
        undo_attention_load_balancing=False,
    )
    return rows


def rows_from_heads(features: Tensor, group: Any) -> Tensor:
    """Return the all-to-all back: [P rows, batch, features / P] to [rows, batch, features]."""
    from megatron.core.ssm.gated_delta_net import common

    rows: Tensor = common.tensor_a2a_hp2cp(
        features.contiguous(), seq_dim=0, head_dim=-1, cp_group=group, redo_attention_load_balancing=False
    )
    return rows


def share_of_heads(parameter: Tensor, group: Any, sections: list[int] | None = None) -> Tensor:
    """Return this rank's share of a parameter's first dim, of each section of it."""
    from megatron.core.ssm.gated_delta_net import common

    share: Tensor = common.get_parameter_local_cp(parameter, dim=0, cp_group=group, split_sections=sections)
    return share
