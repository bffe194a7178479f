# SPDX-License-Identifier: Apache-2.0
"""Clean tokens per second (`--log-throughput`) and exposed communication (`--csbp-timing`), at every log interval."""

from argparse import Namespace

import torch

from megatron_csbp import megatron_reporting
from megatron_csbp.transformer.wait_clock import WaitClock, wait_clock

EXPOSED = "csbp-exposed-communication"
"""Megatron timer: time per iteration that this rank's computation stood still for an exchange of the attention."""
TOKENS_PER_SECOND = "clean-tokens-per-second"


class TimingReport:
    """Measures one rank, and reports through Megatron's timers and writers.

    Attributes:
        clock: what the exchanges measure their waits with; None if they are not measured.
    """

    def __init__(self, device: torch.device, *, measures_waits: bool = True) -> None:
        """Start with nothing measured.

        Args:
            device: where the tensors live.
            measures_waits: whether to measure exposed communication, which needs events on the streams.
        """
        self.clock: WaitClock | None = wait_clock(device) if measures_waits else None
        self._exposed_seconds = 0.0
        self._iterations = 0
        self._samples = 0
        self._reported_at: float | None = None

    def end_iteration(self, args: Namespace) -> None:
        """Add an iteration and, where Megatron logs one, report the interval. Every rank has to call it.

        Args:
            args: Megatron's arguments.
        """
        if self.clock is not None:
            self._exposed_seconds += self.clock.take_seconds()
        self._iterations += 1
        self._samples += megatron_reporting.global_batch_size()
        iteration = args.curr_iteration + 1
        if iteration % args.log_interval:
            return
        seconds = megatron_reporting.training_seconds()
        if self._reported_at is not None:  # the first interval would count what a run does once
            rate = self._samples * args.clean_seq_length / (seconds - self._reported_at)
            megatron_reporting.log_scalar(TOKENS_PER_SECOND, rate, iteration)
            megatron_reporting.print_on_last_rank(
                f" [csbp] iteration {iteration} | clean tokens per second: {rate:.1f} | per rank: "
                f"{rate / args.world_size:.1f} |"
            )
        if self.clock is not None:
            megatron_reporting.log_timer(EXPOSED, self._exposed_seconds, self._iterations, iteration, args)
        self._exposed_seconds, self._iterations, self._samples, self._reported_at = 0.0, 0, 0, seconds
