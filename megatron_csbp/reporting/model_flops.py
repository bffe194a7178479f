# SPDX-License-Identifier: Apache-2.0
"""Corrects Megatron's FLOPs report for two copies of a sequence under the block-diffusion mask.

Megatron takes `seq_length` rows under one causal mask, with logits of every row. With both copies' 2L rows that is
about twice the attention that the mask allows, and logits of rows that carry no loss.
"""

from argparse import Namespace
from functools import cached_property
from typing import Any

from megatron_csbp import megatron_reporting
from megatron_csbp.transformer.attention_plan import CleanAttention, allowed_pairs


class ModelFlops:
    """Tells Megatron, for each micro-batch, the rows and pairs that count."""

    def __init__(self, args: Namespace) -> None:
        """Take Megatron's validated arguments."""
        self._args = args

    @cached_property
    def _logit_share(self) -> float:
        """Part of the operations for one row, attention apart, that Megatron gives to its logits."""
        per_row = megatron_reporting.stock_flops(self._args, rows=1.0, squared_lengths=0.0)
        return self.per_loss_row() / per_row

    @cached_property
    def allowed_pairs(self) -> int:
        """Query-key pairs that the mask allows in one sequence."""
        args = self._args
        return allowed_pairs(args.clean_seq_length, args.diffusion_block_size, CleanAttention(args.clean_attention))

    def count_micro_batch(self, model: Any, loss_rows: int) -> None:
        """Enter one training micro-batch of this rank's stage into Megatron's statistics.

        Args:
            model: the (wrapped) GPT stage.
            loss_rows: rows on this rank that carry loss, in all sequences of the micro-batch.
        """
        args = self._args
        if not megatron_reporting.is_counted_chunk(model):
            return
        rows = 2 * args.clean_seq_length * args.micro_batch_size * (1 - self._logit_share)
        if megatron_reporting.computes_loss(model):
            # Megatron adds up all ranks and divides by the size of a model replica. These rows are on one pipeline
            # stage only, and each context rank has others.
            rows += loss_rows * args.context_parallel_size * args.pipeline_model_parallel_size * self._logit_share
        # Megatron gives a causal sequence of n rows the work of n^2 / 2 pairs.
        megatron_reporting.count_rows(rows, 2.0 * self.allowed_pairs * args.micro_batch_size)

    def per_loss_row(self) -> float:
        """Return the operations of the logits of one row."""
        return float(6 * self._args.hidden_size * self._args.padded_vocab_size)

    def per_sequence(self) -> tuple[float, float]:
        """Return the operations of one sequence without its logits, and Megatron's own figure without its logits."""
        args, length = self._args, 2 * self._args.clean_seq_length
        rows = length * (1 - self._logit_share)
        stock = megatron_reporting.stock_flops(args, rows=rows, squared_lengths=float(length) ** 2)
        return megatron_reporting.stock_flops(args, rows=rows, squared_lengths=2.0 * self.allowed_pairs), stock
