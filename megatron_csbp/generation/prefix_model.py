# SPDX-License-Identifier: Apache-2.0
"""Megatron's GPT model behind a cached clean prefix, with the weights of a checkpoint.

Shapes: S rows of a pass, B micro-batch (1), H hidden size, V padded vocabulary.
"""

import functools
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.models.gpt import default_layer_spec
from torch import Tensor

from megatron_csbp import megatron_loading
from megatron_csbp.generation.prefix_attention import PrefixCoreAttention, PrefixPass, PrefixRotaryEmbedding
from megatron_csbp.transformer.layer_specs import with_core_attention
from megatron_csbp.transformer.query_scale import query_scale

PREFILL_ROWS = 1024
"""Rows of one pass over a long prompt; the mask of a pass has this many times as many entries as the prefix."""


class CachedPrefixModel:
    """A model on one rank of a tensor-parallel group (see `decoding.PrefixModel`); every rank gets all logits."""

    def __init__(self, model: Any, state: PrefixPass, causal_block_size: int) -> None:
        """Wrap a model.

        Args:
            model: Megatron's (wrapped) GPT model in evaluation mode, whose attention and rotary embedding hold
                `state`.
            state: of the passes.
            causal_block_size: clean rows see their whole block of this size and what is before it; 1 for token-causal.
        """
        self._model = model
        self._state = state
        self._block_size = causal_block_size
        self._device = next(model.parameters()).device
        self._prefix_length = 0

    def restart(self, capacity: int) -> None:
        """Forget the prefix, and make room for this many positions."""
        self._prefix_length = 0
        self._state.capacity = capacity

    def append(self, tokens: Sequence[int]) -> Tensor:
        """See `decoding.PrefixModel`. With block-causal attention only whole blocks may be appended."""
        rows = max(self._block_size, PREFILL_ROWS // self._block_size * self._block_size)
        logits_SV = torch.empty(0)
        for first in range(0, len(tokens), rows):
            part = tokens[first : first + rows]
            stop = self._prefix_length + len(part)
            assert stop % self._block_size == 0, "part of a block"
            positions_S = torch.arange(self._prefix_length, stop, device=self._device)
            seen_S = (positions_S // self._block_size + 1) * self._block_size
            visible_ST = torch.arange(stop, device=self._device) < seen_S[:, None]
            logits_SV = self._forward(part, visible_ST, slice(-1, None))
            self._prefix_length = stop
        return logits_SV[-1]

    def denoise(self, tokens: Sequence[int]) -> Tensor:
        """See `decoding.PrefixModel`."""
        return self._forward(tokens, None, slice(None))

    @torch.no_grad()
    def _forward(self, tokens: Sequence[int], visible_ST: Tensor | None, scored: slice) -> Tensor:
        """Run the rows behind the prefix; return the logits of the scored ones, fp32 [rows, V]."""
        self._state.start, self._state.length = self._prefix_length, len(tokens)
        self._state.visible_ST = visible_ST
        tokens_BS = torch.tensor([list(tokens)], device=self._device)
        positions_BS = torch.arange(self._prefix_length, self._prefix_length + len(tokens), device=self._device)[None]
        logits_S1V: Tensor = self._model(
            tokens_BS, positions_BS, None, output_processor=_logits_of_rows, output_processor_context=scored
        )
        return logits_S1V[:, 0].float()


def _logits_of_rows(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    scale_logits: Any,
    context: slice,
    **unused: Any,
) -> Tensor:
    """Megatron's `output_processor`: hidden states [S, B, H] to the whole logits of some rows, [rows, B, V]."""
    logits_SBV, _ = output_layer(hidden_states[context], weight=output_weight, runtime_gather_output=True)
    scaled: Tensor = scale_logits(logits_SBV)
    return scaled


def load_model(args: Namespace) -> CachedPrefixModel:
    """Build the model of the arguments and load the weights of `--load`, on every tensor-parallel rank together.

    Args:
        args: Megatron's validated, global arguments; Megatron is initialised.
    """
    state = PrefixPass(scale_queries=query_scale(args.query_scale_beta, args.yarn_original_max_position_embeddings))
    groups = ProcessGroupCollection.use_mpu_process_groups()
    config = gpt_config_from_args(args)
    stock_spec = config.transformer_layer_spec or default_layer_spec(config, None)
    config.transformer_layer_spec = with_core_attention(
        stock_spec, functools.partial(PrefixCoreAttention, state=state)
    )
    builder = config.get_builder_cls()(config)
    (model,) = builder.build_distributed_models(groups, wrap_with_ddp=False)
    megatron_loading.load_weights(model)
    gpt = megatron_loading.unwrapped(model)
    if hasattr(gpt, "rotary_pos_emb"):
        gpt.rotary_pos_emb = PrefixRotaryEmbedding(gpt.rotary_pos_emb, state)
    is_block_causal = getattr(args, "clean_attention", None) == "block-causal"
    return CachedPrefixModel(model.eval(), state, args.diffusion_block_size if is_block_causal else 1)
