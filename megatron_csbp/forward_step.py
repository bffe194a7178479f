# SPDX-License-Identifier: Apache-2.0
"""Megatron's `forward_step_func` for block diffusion: batch, model, loss.

Shapes: S local rows, B micro-batch, R rows with loss.
"""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from megatron_csbp import megatron_compat, megatron_reporting
from megatron_csbp.arguments import sequence_layout
from megatron_csbp.loss.objectives.interface import LossSums, Objective, ratio
from megatron_csbp.loss.row_losses import LossRowSelection, RowLosses, select_loss_rows
from megatron_csbp.reporting.instruments import Instruments
from megatron_csbp.reporting.model_flops import ModelFlops
from megatron_csbp.transformer.layout import SequenceLayout

_INTEGER_KEYS = ("tokens", "position_ids", "labels", "num_tokens", "num_supervised")
_FLOAT_KEYS = ("loss_weights",)


@dataclass
class BlockDiffusionForwardStep:
    """One micro-batch forward, as Megatron's schedules call it.

    Attributes:
        args: Megatron's arguments.
        objective: what the loss is.
        instruments: what the run measures about itself, if anything.
    """

    args: Namespace
    objective: Objective
    instruments: Instruments | None = None

    @cached_property
    def _layout(self) -> SequenceLayout:
        return sequence_layout(self.args, megatron_compat.context_parallel_rank())

    @cached_property
    def _flops(self) -> ModelFlops:
        return ModelFlops(self.args)

    @cached_property
    def _is_corrupted_S(self) -> Tensor:
        return torch.from_numpy(self._layout.is_corrupted).to(megatron_compat.current_device())

    def __call__(
        self, data_iterator: Iterator[dict[str, Tensor]] | None, model: Any, return_schedule_plan: bool = False
    ) -> tuple[Tensor, Any]:
        """Run one micro-batch.

        Args:
            data_iterator: yields this rank's rows; None on ranks that load nothing.
            model: the (wrapped) GPT stage.
            return_schedule_plan: not supported; the flag that asks for it is refused at start.

        Returns:
            The stage's output and the loss function for the schedule.
        """
        assert not return_schedule_plan, "--overlap-moe-expert-parallel-comm is refused at start"
        if self.instruments is not None:
            self.instruments.before_micro_batch(model, self.args)
        with megatron_compat.batch_timer():
            batch = self._next_batch(data_iterator, model)
        if batch is None:
            if model.training:
                self._flops.count_micro_batch(model, loss_rows=0)
            return model(None, None, None), None
        selection = select_loss_rows(batch["labels"], batch["loss_weights"], self._is_corrupted_S)
        if model.training:
            self._flops.count_micro_batch(model, selection.rows_R.numel())
            if self.instruments is not None and megatron_reporting.computes_loss(model):
                self.instruments.count_loss_rows(selection.rows_R.numel())
        excluded = self.args.mask_token_id if self.objective.excludes_mask_logit else None
        output = model(
            batch["tokens"],
            batch["position_ids"],
            None,
            output_processor=RowLosses(excluded, self.args.padded_vocab_size, self.args.csbp_loss_chunk_rows),
            output_processor_context=selection,
        )
        return output, partial(self._loss, batch, selection, evaluating=not model.training)

    def _next_batch(self, data_iterator: Iterator[dict[str, Tensor]] | None, model: Any) -> dict[str, Tensor] | None:
        """Return the micro-batch on every rank of the tensor-parallel group; None on a middle pipeline stage."""
        if not megatron_compat.stage_needs_batch(model):
            return None
        data = next(data_iterator) if data_iterator is not None else None
        batch = megatron_compat.broadcast_in_tensor_parallel_group(_INTEGER_KEYS, data, torch.int64)
        batch |= megatron_compat.broadcast_in_tensor_parallel_group(_FLOAT_KEYS, data, torch.float32)
        return batch

    def _loss(
        self, batch: dict[str, Tensor], selection: LossRowSelection, losses_R: Tensor, *, evaluating: bool
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the local numerator, the local integer denominator, and the reports as such pairs."""
        weighted_R = losses_R * selection.weights_R
        loss = weighted_R.sum()
        megatron_compat.check_loss(loss, self.args)
        sums = loss_sums(batch, selection, weighted_R.detach())
        reports = self.objective.reports(sums, evaluating)
        if not evaluating:
            reports["masked fraction"] = ratio(sums.corrupted_rows, sums.num_supervised)
        packed = {
            name: torch.stack([numerator.float(), denominator.float()])
            for name, (numerator, denominator) in reports.items()
        }
        return loss, batch["num_tokens"].sum().to(torch.int), packed


def loss_sums(batch: dict[str, Tensor], selection: LossRowSelection, weighted_R: Tensor) -> LossSums:
    """Sum the weighted losses of a micro-batch by copy."""
    corrupted_R = selection.corrupted_R
    carries_R = selection.weights_R != 0
    zero = torch.zeros_like(weighted_R)
    return LossSums(
        corrupted_loss=torch.where(corrupted_R, weighted_R, zero).sum(),
        clean_loss=torch.where(corrupted_R, zero, weighted_R).sum(),
        corrupted_rows=(corrupted_R & carries_R).sum(),
        clean_rows=(~corrupted_R & carries_R).sum(),
        num_tokens=batch["num_tokens"].sum(),
        num_supervised=batch["num_supervised"].sum(),
    )
