# SPDX-License-Identifier: Apache-2.0
"""Core attention and rotary embedding of a model that reads behind a cached clean prefix.

Shapes: S rows of a pass, T positions up to the last of them, B micro-batch, N query heads, K key/value heads on this
tensor-parallel rank, D head dim.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


@dataclass
class PrefixPass:
    """Where the rows of a forward pass stand; one object, shared by all layers of a model.

    Attributes:
        capacity: positions that the caches hold.
        start: position of the first row, which is the length of the prefix.
        length: S.
        visible_ST: which keys of positions below start + S a row sees; None for all of them.
        scale_queries: what is done to queries by position (`positions_S`), if anything.
    """

    capacity: int = 0
    start: int = 0
    length: int = 0
    visible_ST: Tensor | None = None
    scale_queries: Callable[[Tensor, Tensor], Tensor] | None = None


class PrefixCoreAttention(MegatronModule):
    """Attention of a pass to the cached prefix and to its own rows; a drop-in for Megatron's core attention.

    Has no parameters and no state in checkpoints. The keys and values of a pass are written behind the prefix, where
    the next pass finds them if the prefix has grown, and overwrites them if it has not.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        state: PrefixPass,
    ) -> None:
        """See the class; the arguments are those of Megatron's `DotProductAttention`, plus `state`.

        Raises:
            ValueError: cross attention.
        """
        super().__init__(config=config)
        if attention_type != "self":
            raise ValueError(f"generation does self attention, not {attention_type} attention.")
        self._softmax_scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self._state = state
        self._keys_TBKD: Tensor | None = None
        self._values_TBKD: Tensor | None = None

    def forward(
        self,
        query_SBND: Tensor,
        key_SBKD: Tensor,
        value_SBKD: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Return the context rows, [S, B, N*D]. The mask is that of `PrefixPass`; the others must be None."""
        assert attention_mask is None
        assert attention_bias is None
        assert packed_seq_params is None
        state = self._state
        stop = state.start + state.length
        assert query_SBND.shape[0] == state.length
        assert stop <= state.capacity
        if self._keys_TBKD is None or self._keys_TBKD.shape[0] != state.capacity:
            self._keys_TBKD = key_SBKD.new_empty(state.capacity, *key_SBKD.shape[1:])
            self._values_TBKD = value_SBKD.new_empty(state.capacity, *value_SBKD.shape[1:])
        assert self._values_TBKD is not None
        self._keys_TBKD[state.start : stop] = key_SBKD
        self._values_TBKD[state.start : stop] = value_SBKD
        if state.scale_queries is not None:
            positions_S = torch.arange(state.start, stop, device=query_SBND.device)
            query_SBND = state.scale_queries(query_SBND, positions_S)
        out_BNSD = F.scaled_dot_product_attention(
            query_SBND.permute(1, 2, 0, 3),
            self._keys_TBKD[:stop].permute(1, 2, 0, 3),
            self._values_TBKD[:stop].permute(1, 2, 0, 3),
            attn_mask=state.visible_ST,
            scale=self._softmax_scale,
            enable_gqa=query_SBND.shape[2] != key_SBKD.shape[2],
        )
        return out_BNSD.permute(2, 0, 1, 3).flatten(2)


class PrefixRotaryEmbedding(nn.Module):
    """Stands in for a model's `rotary_pos_emb`: the angles of the positions of a pass."""

    def __init__(self, rotary: Any, state: PrefixPass) -> None:
        """Wrap Megatron's RoPE or YaRN embedding."""
        super().__init__()
        self.rotary = rotary
        self._state = state

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        """Return S."""
        return self._state.length

    def forward(self, max_seq_len: int, **kwargs: Any) -> Any:
        """Return Megatron's angles, [S, 1, 1, rotary dims]; with YaRN also its scale factor."""
        return self.rotary.get_emb(self._state.length, offset=self._state.start)
