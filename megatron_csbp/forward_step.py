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

from megatron_csbp import megatron_compat, megatron_model, megatron_reporting
from megatron_csbp.arguments import static_plans
from megatron_csbp.loss.row_losses import LossRowSelection, RowLosses, select_loss_rows
from megatron_csbp.objectives.interface import LossSums, Objective, ratio
from megatron_csbp.reporting.instruments import Instruments
from megatron_csbp.reporting.model_flops import ModelFlops
from megatron_csbp.transformer.geometry.layer_plans import LayerPlans
from megatron_csbp.transformer.sample_params import sample_params


@dataclass
class BlockDiffusionForwardStep:
    """One micro-batch forward, as Megatron's schedules call it.

    Every rank that needs a micro-batch reads it itself. Sizes are known on the host, so nothing waits for the device.

    Attributes:
        args: Megatron's arguments.
        objective: what the loss is.
        instruments: what the run measures about itself, if anything.
    """

    args: Namespace
    objective: Objective
    instruments: Instruments | None = None

    @cached_property
    def _static_plans(self) -> LayerPlans:
        return static_plans(self.args, megatron_compat.context_parallel_rank())

    @cached_property
    def _flops(self) -> ModelFlops:
        return ModelFlops(self.args)

    def __call__(
        self, data_iterator: Iterator[dict[str, Any]] | None, model: Any, return_schedule_plan: bool = False
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
        with megatron_compat.batch_timer():
            data = next(data_iterator) if data_iterator is not None else None
            own_plans = None if data is None else data.get("plans")
            needs_batch = megatron_compat.stage_needs_batch(model)
            batch, selection = self._batch(data, own_plans) if needs_batch else (None, None)
        plans = own_plans or self._static_plans
        if self.instruments is not None:
            self.instruments.before_micro_batch(model, self.args, plans)
        if model.training:
            num_loss_rows = 0 if selection is None else selection.num_rows
            self._flops.count_micro_batch(model, plans.rows.sample, num_loss_rows)
            if self.instruments is not None and megatron_reporting.computes_loss(model):
                self.instruments.count_loss_rows(num_loss_rows)
        params = None if own_plans is None else sample_params(own_plans)
        megatron_model.use_rows_in_rotary(model, None if own_plans is None else own_plans.rows)
        if batch is None or selection is None:
            return model(None, None, None, packed_seq_params=params), None
        excluded = self.args.mask_token_id if self.objective.excludes_mask_logit else None
        output = model(
            batch["tokens"],
            batch["position_ids"],
            None,
            packed_seq_params=params,
            output_processor=RowLosses(excluded, self.args.padded_vocab_size, self.args.csbp_loss_chunk_rows),
            output_processor_context=selection,
        )
        return output, partial(self._loss, batch, selection, evaluating=not model.training)

    def _batch(
        self, data: dict[str, Any] | None, own_plans: LayerPlans | None
    ) -> tuple[dict[str, Tensor], LossRowSelection]:
        """Return the micro-batch and its rows with loss on this rank's device."""
        assert data is not None, "a stage that embeds or computes the loss reads samples"
        rows = (own_plans or self._static_plans).rows
        device = megatron_compat.current_device()
        selection = select_loss_rows(data["labels"], data["loss_weights"], torch.from_numpy(rows.is_corrupted))
        batch = {name: value.to(device, non_blocking=True) for name, value in data.items() if name != "plans"}
        return batch, selection.to(device)

    def _loss(
        self, batch: dict[str, Tensor], selection: LossRowSelection, losses_R: Tensor, *, evaluating: bool
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the local numerator, the local integer denominator, and the reports as such pairs."""
        weighted_R = losses_R * selection.weights_R
        loss = weighted_R.sum()
        megatron_compat.check_loss(loss, self.args)
        sums = loss_sums(batch, selection, losses_R.detach())
        reports = self.objective.reports(sums, evaluating)
        if not evaluating:
            reports["masked fraction"] = ratio(sums.corrupted_rows, sums.num_supervised)
        packed = {
            name: torch.stack([numerator.float(), denominator.float()])
            for name, (numerator, denominator) in reports.items()
        }
        return loss, batch["num_tokens"].sum().to(torch.int), packed


def loss_sums(batch: dict[str, Tensor], selection: LossRowSelection, losses_R: Tensor) -> LossSums:
    """Sum the cross-entropies of a micro-batch by copy."""
    corrupted_R = selection.corrupted_R
    carries_R = selection.weights_R != 0
    weighted_R = losses_R * selection.weights_R
    zero = torch.zeros_like(weighted_R)
    return LossSums(
        corrupted_loss=torch.where(corrupted_R, weighted_R, zero).sum(),
        corrupted_cross_entropy=torch.where(corrupted_R & carries_R, losses_R, zero).sum(),
        clean_loss=torch.where(corrupted_R, zero, weighted_R).sum(),
        corrupted_rows=(corrupted_R & carries_R).sum(),
        clean_rows=(~corrupted_R & carries_R).sum(),
        num_tokens=batch["num_tokens"].sum(),
        num_supervised=batch["num_supervised"].sum(),
    )
