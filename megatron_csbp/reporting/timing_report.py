# SPDX-License-Identifier: Apache-2.0
"""`--csbp-timing`: exposed communication of the attention, at every log interval."""

from argparse import Namespace

import torch

from megatron_csbp import megatron_reporting
from megatron_csbp.transformer.wait_clock import WaitClock, wait_clock

EXPOSED = "csbp-exposed-communication"
"""Megatron timer: time per iteration that this rank's computation stood still for an exchange of the attention."""


class TimingReport:
    """Measures one rank, and reports through Megatron's timers and writers.

    Attributes:
        clock: what the exchanges measure their waits with.
    """

    def __init__(self, device: torch.device) -> None:
        """Start with nothing measured.

        Args:
            device: where the tensors live.
        """
        self.clock: WaitClock = wait_clock(device)
        self._exposed_seconds = 0.0
        self._iterations = 0

    def end_iteration(self, args: Namespace) -> None:
        """Add an iteration and, where Megatron logs one, report the interval. Every rank has to call it.

        Args:
            args: Megatron's arguments.
        """
        self._exposed_seconds += self.clock.take_seconds()
        self._iterations += 1
        iteration = args.curr_iteration + 1
        if iteration % args.log_interval:
            return
        megatron_reporting.log_timer(EXPOSED, self._exposed_seconds, self._iterations, iteration, args)
        self._exposed_seconds, self._iterations = 0.0, 0
