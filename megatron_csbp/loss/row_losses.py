# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of the rows that carry loss, and of no other row, a chunk of rows at a time.

Logits and their softmax are the largest tensors of a model with a large vocabulary: 128K rows of 128K logits in fp32
are 64 GiB. So a chunk's logits are dropped after its loss and computed again in the backward pass.

Shapes: S local rows, B micro-batch, H hidden size, R rows with loss of all sequences of a micro-batch or of one chunk,
V vocabulary on this tensor-parallel rank.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_csbp import megatron_compat
from megatron_csbp.loss.chunked_losses import losses_in_chunks


@dataclass(frozen=True)
class LossRowSelection:
    """Which rows of a micro-batch carry loss.

    Attributes:
        rows_R: row in the flattened [S, B] order, int64.
        targets_R: token to predict, int64.
        weights_R: factor on its cross-entropy, fp32.
        corrupted_R: whether the row is of the corrupted copy, bool.
        is_empty: no row carries loss; the one that is there may not touch the loss or a gradient, whatever it holds.
    """

    rows_R: Tensor
    targets_R: Tensor
    weights_R: Tensor
    corrupted_R: Tensor
    is_empty: bool = False

    @property
    def num_rows(self) -> int:
        """R."""
        return self.rows_R.numel()

    def to(self, device: torch.device) -> "LossRowSelection":
        """Return the selection on a device, without waiting for it."""
        names = ("rows_R", "targets_R", "weights_R", "corrupted_R")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


def select_loss_rows(targets_BS: Tensor, weights_BS: Tensor, is_corrupted_S: Tensor) -> LossRowSelection:
    """Select the rows with a weight; without any, one row of weight 0, so that every rank runs every layer.

    On the host: the number of rows is the size of what follows.

    Args:
        targets_BS: token to predict at each row, int64.
        weights_BS: factor on its cross-entropy, fp32; 0 carries no loss.
        is_corrupted_S: whether a local row is of the corrupted copy, bool.
    """
    weights_SB = weights_BS.t().contiguous()
    rows_R = weights_SB.view(-1).nonzero().view(-1)
    is_empty = rows_R.numel() == 0
    if is_empty:
        rows_R = rows_R.new_zeros(1)
    return LossRowSelection(
        rows_R=rows_R,
        targets_R=targets_BS.t().reshape(-1)[rows_R],
        weights_R=weights_SB.view(-1)[rows_R],
        corrupted_R=is_corrupted_S[rows_R // targets_BS.shape[0]],
        is_empty=is_empty,
    )


@dataclass(frozen=True)
class RowLosses:
    """Megatron's `output_processor`: hidden states of all rows to the cross-entropy of the rows with loss.

    Attributes:
        excluded_token_id: logit that corrupted rows may not predict (the mask id), or None.
        padded_vocab_size: V times the tensor-parallel size.
        chunk_rows: rows whose logits exist at a time; 0 for all. More rows than this are cut into chunks, whose
            logits are computed a second time in the backward pass.
    """

    excluded_token_id: int | None
    padded_vocab_size: int
    chunk_rows: int = 0

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        output_layer: Any,
        output_weight: Tensor | None,
        compute_language_model_loss: Any,
        scale_logits: Any,
        config: Any,
        context: LossRowSelection,
        **unused: Any,
    ) -> Tensor:
        """Return the cross-entropy [R] in fp32. `context` is the selection; the rest is what GPTModel hands over."""

        def losses_of(rows_R1H: Tensor, weight_VH: Tensor, chunk: slice) -> Tensor:
            # Entered here, since a chunk's backward pass computes it again when this call is long over.
            with megatron_compat.output_layer_of_whole_rows(output_layer, config):
                logits_R1V, _ = output_layer(rows_R1H, weight=weight_VH)
            logits_R1V = scale_logits(logits_R1V)
            if context.is_empty:
                logits_R1V = _cut_off(logits_R1V)
            targets_R = context.targets_R[chunk]
            if self.excluded_token_id is not None:
                excludes_R = context.corrupted_R[chunk] & (targets_R != self.excluded_token_id)
                logits_R1V = self._without_token(self.excluded_token_id, logits_R1V, excludes_R)
            losses_1R: Tensor = compute_language_model_loss(targets_R.unsqueeze(0), logits_R1V)
            return losses_1R.view(-1).float()

        hidden_SBH = megatron_compat.gather_sequence(hidden_states, config)
        rows_R1H = hidden_SBH.flatten(0, 1).index_select(0, context.rows_R).unsqueeze(1)
        if context.is_empty:
            rows_R1H = _cut_off(rows_R1H)
        weight_VH = output_layer.weight if output_weight is None else output_weight
        if not 0 < self.chunk_rows < context.rows_R.numel():
            return losses_of(rows_R1H, weight_VH, slice(None))
        fuses = bool(config.gradient_accumulation_fusion) and hasattr(weight_VH, "main_grad")
        return losses_in_chunks(losses_of, rows_R1H, weight_VH, self.chunk_rows, fuses_weight_gradient=fuses)

    def _without_token(self, token_id: int, logits_R1V: Tensor, excludes_R: Tensor) -> Tensor:
        """Set the mask id's logit to -inf in rows of the corrupted copy, save where the data has it as the target."""
        vocab = logits_R1V.shape[-1]
        column = token_id - megatron_compat.first_vocabulary_id(vocab, self.padded_vocab_size)
        if not 0 <= column < vocab:
            return logits_R1V
        is_token_V = torch.arange(vocab, device=logits_R1V.device) == column
        return logits_R1V.masked_fill(excludes_R.view(-1, 1, 1) & is_token_V, -torch.inf)


def _cut_off(values: Tensor) -> Tensor:
    """Return zeros whose gradient is zero: a weight of 0 would let NaN and Inf through, in both directions."""
    return values.masked_fill(torch.ones_like(values, dtype=torch.bool), 0.0)
