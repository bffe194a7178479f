# SPDX-License-Identifier: Apache-2.0
"""Touches of Megatron's models and their layers; see `megatron_csbp.megatron_compat`."""

from typing import Any


def layer_window(config: Any, layer_number: int) -> int | None:
    """Return a layer's window by `--window-size LEFT,0` and `--window-attn-skip-freq`: LEFT + 1, or None for none.

    Args:
        config: Megatron's `TransformerConfig`.
        layer_number: number of the layer in the whole model, from 1.
    """
    from megatron.core.transformer import utils

    if not utils.is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None
    left: int = config.window_size[0]
    return None if left < 0 else left + 1


def use_rows_in_rotary(model: Any, rows: Any) -> None:
    """Tell a stage's rotary embedding the rows of the call that comes; see `RowRotaryEmbedding.use`.

    Args:
        model: the (wrapped) stage; learned positions or a stage without layers have no rotary embedding.
        rows: `RankRows` of the sample, or None for those of every sample.
    """
    from megatron.core.utils import unwrap_model

    unwrapped = unwrap_model(model)
    rotary = getattr(unwrapped, "rotary_pos_emb", None)
    if rotary is not None:
        rotary.use(rows)
