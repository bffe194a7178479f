# SPDX-License-Identifier: Apache-2.0
"""What a training run measures about itself: its progress and, on request, bytes moved and exposed communication.

The forward step owns the instruments and tells them of every micro-batch; Megatron's hook at the end of the backward
pass tells them that an iteration is over.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from megatron_csbp import megatron_compat, megatron_reporting
from megatron_csbp.configuration.performance_arguments import recomputes_layer
from megatron_csbp.reporting.progress_report import ProgressReport
from megatron_csbp.reporting.timing_report import TimingReport
from megatron_csbp.reporting.traffic_report import TrafficReport
from megatron_csbp.transformer.core_attention import CSBPCoreAttention
from megatron_csbp.transformer.delta_net.layer import BlockDiffusionGatedDeltaNet
from megatron_csbp.transformer.geometry.layer_plans import LayerPlans
from megatron_csbp.transformer.traffic_ledger import Volumes


@dataclass
class Instruments:
    """The measurements of one rank.

    Attributes:
        traffic: the byte ledger, with `--csbp-ledger`.
        timing: the clock, with `--csbp-timing`.
        progress: the line of progress.
    """

    traffic: TrafficReport | None
    timing: TimingReport | None
    progress: ProgressReport
    _chunks: dict[int, list[CSBPCoreAttention | BlockDiffusionGatedDeltaNet]] = field(default_factory=dict)
    _hooked: bool = False

    def before_micro_batch(self, model: Any, args: Namespace, plans: LayerPlans) -> None:
        """Tell the instruments that a stage is about to run one micro-batch forward.

        Args:
            model: the (wrapped) GPT stage.
            args: Megatron's arguments.
            plans: of the micro-batch's samples.
        """
        self.progress.say(args)  # of the last iteration, which Megatron has logged by now
        layers = self._chunks.get(id(model))
        if layers is None:
            layers = self._chunks[id(model)] = self._attach(model)
        if model.training and not self._hooked:  # the chunks of a rank share one config
            megatron_reporting.call_after_backward(model, self._end_iteration)
            self._hooked = True
        if self.traffic is not None:
            attention = [
                (layer.layer_number, layer.plan(plans, drops_clean_rows=layer.drops_clean_rows()))
                for layer in layers
                if isinstance(layer, CSBPCoreAttention)
            ]
            others = _delta_net_volumes(layers, plans, args, training=model.training)
            self.traffic.expect_micro_batch(attention, args, training=model.training, others=others)

    def count_loss_rows(self, rows: int) -> None:
        """Tell the instruments how many rows of a training micro-batch carry loss on this rank."""
        self.progress.count_loss_rows(rows)

    def _attach(self, model: Any) -> list[CSBPCoreAttention | BlockDiffusionGatedDeltaNet]:
        """Hand the ledger and the clock to every layer of a stage that exchanges."""
        kinds = CSBPCoreAttention | BlockDiffusionGatedDeltaNet
        layers = [module for module in model.modules() if isinstance(module, kinds)]
        for layer in layers:
            layer.observe(
                None if self.traffic is None else self.traffic.ledger,
                None if self.timing is None else self.timing.clock,
            )
        return layers

    def _end_iteration(self) -> None:
        """Close the accounts of one training iteration; runs at the same point on every rank."""
        args = megatron_reporting.arguments()
        self.progress.end_iteration(args)
        if self.traffic is not None:
            self.traffic.end_iteration(args.curr_iteration + 1)
        if self.timing is not None:
            self.timing.end_iteration(args)

    def close(self) -> None:
        """End the run: write what is left, and print the last line of progress and the table of the ledger."""
        self.progress.say(megatron_reporting.arguments(), with_writers=False)
        if self.traffic is not None:
            self.traffic.close()


def _delta_net_volumes(
    layers: Sequence[CSBPCoreAttention | BlockDiffusionGatedDeltaNet],
    plans: LayerPlans,
    args: Namespace,
    *,
    training: bool,
) -> list[Volumes]:
    """Return what each gated delta net of a stage has to exchange for one micro-batch."""
    size = args.micro_batch_size if training else args.eval_micro_batch_size or args.micro_batch_size
    first = min((layer.layer_number for layer in layers), default=1)
    return [
        layer.expected_volumes(
            layer.rows(plans),
            size,
            training=training,
            recomputed=recomputes_layer(args, layer.layer_number - first),
        )
        for layer in layers
        if isinstance(layer, BlockDiffusionGatedDeltaNet)
    ]


@contextmanager
def closing(instruments: Instruments | None) -> Iterator[None]:
    """Close the instruments after a run that ended as it should, also by `sys.exit`; one that failed gets no table."""
    try:
        yield
    except SystemExit as leaving:
        if instruments is not None and not leaving.code:
            instruments.close()
        raise
    if instruments is not None:
        instruments.close()


def instruments_from_args(args: Namespace) -> Instruments:
    """Return the instruments of a run: the line of progress, and what the flags ask for."""
    return Instruments(
        TrafficReport(args.csbp_ledger, args.rank) if args.csbp_ledger is not None else None,
        TimingReport(megatron_compat.current_device()) if args.csbp_timing else None,
        ProgressReport(args),
    )
