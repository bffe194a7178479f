# SPDX-License-Identifier: Apache-2.0
"""Corrects Megatron's FLOPs report for several copies of a sequence under the block-diffusion mask.

Megatron takes `seq_length` rows under one causal mask, with logits of every row. With the 2L rows of both copies that
is about twice the attention that the mask allows, and logits of rows that carry no loss.
"""

from argparse import Namespace
from functools import cached_property, lru_cache
from typing import Any

from megatron_csbp import megatron_delta_net, megatron_model, megatron_reporting
from megatron_csbp.arguments import layer_mask, static_sample
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.visibility import Mask, allowed_pairs


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

    def mean_pairs(self, sample: Sample) -> float:
        """Return the query-key pairs that a layer's mask allows in one sample, on average over the layers that attend.

        Megatron's own formula gives every layer the same.
        """
        return _mean_pairs(self._args, sample)

    def count_micro_batch(self, model: Any, sample: Sample, loss_rows: int) -> None:
        """Enter one training micro-batch of this rank's stage into Megatron's statistics.

        Args:
            model: the (wrapped) GPT stage.
            sample: geometry of its samples.
            loss_rows: rows on this rank that carry loss, in all sequences of the micro-batch.
        """
        args = self._args
        if not megatron_reporting.is_counted_chunk(model):
            return
        rows = _num_rows(sample) * args.micro_batch_size * (1 - self._logit_share)
        if megatron_reporting.computes_loss(model):
            # Megatron adds up all ranks and divides by the size of a model replica. These rows are on one pipeline
            # stage only, and each context rank has others.
            rows += loss_rows * args.context_parallel_size * args.pipeline_model_parallel_size * self._logit_share
        # Megatron gives a causal sequence of n rows the work of n^2 / 2 pairs.
        megatron_reporting.count_rows(rows, 2.0 * self.mean_pairs(sample) * args.micro_batch_size)

    def per_loss_row(self) -> float:
        """Return the operations of the logits of one row."""
        return float(6 * self._args.hidden_size * self._args.padded_vocab_size)

    def per_sequence(self) -> tuple[float, float]:
        """Return the operations of one sequence without its logits, and Megatron's own figure without its logits."""
        args, sample = self._args, static_sample(self._args)
        length = _num_rows(sample)
        rows = length * (1 - self._logit_share)
        stock = megatron_reporting.stock_flops(args, rows=rows, squared_lengths=float(length) ** 2)
        return megatron_reporting.stock_flops(args, rows=rows, squared_lengths=2.0 * self.mean_pairs(sample)), stock


def _num_rows(sample: Sample) -> int:
    """Return the rows of all copies of a sample."""
    return sample.length + int(sample.active_blocks.sum()) * sample.block_size


def _mean_pairs(args: Namespace, sample: Sample) -> float:
    windows = [megatron_model.layer_window(args, number) for number in megatron_delta_net.attention_layers(args)]
    if not windows:
        return 0.0
    return sum(
        windows.count(window) * _pairs(sample, layer_mask(args, window)) for window in dict.fromkeys(windows)
    ) / len(windows)


@lru_cache(maxsize=8)
def _pairs(sample: Sample, mask: Mask) -> int:
    """Return the pairs of a sample; the same object comes again where all samples share one geometry."""
    return allowed_pairs(sample, mask)
