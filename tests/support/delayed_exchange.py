# SPDX-License-Identifier: Apache-2.0
"""Fault injection on real process groups: collectives that start late, read late and finish in any order."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import torch
import torch.distributed as dist
from megatron_csbp.transformer.layout import SequenceLayout, Stream
from torch import Tensor

from megatron_csbp.transformer.communication import ContextGroupExchange, PendingWork


class DelayedExchange:
    """The real exchange, each collective of which sleeps first, in a thread and on a process group of its own.

    Groups of their own are what lets one collective overtake another; with one group they would only queue.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], delay: Callable[[int], float]) -> None:
        """Take the network.

        Args:
            groups: groups of the same ranks, used in turn; more than there are collectives under way at once.
            delay: seconds that the collective with this number sleeps before it starts.
        """
        self._exchanges = [ContextGroupExchange(group) for group in groups]
        self._delay = delay
        self._numbers = count()

    def start_gather(self, tensors_SBKD: Sequence[Tensor], layout: SequenceLayout, stream: Stream) -> "_Delayed":
        return self._start(lambda exchange: exchange.start_gather(tensors_SBKD, layout, stream))

    def start_reduce_scatter(
        self, buffers_RBKD: Sequence[Tensor], layout: SequenceLayout, stream: Stream, payload_dtype: torch.dtype
    ) -> "_Delayed":
        return self._start(lambda exchange: exchange.start_reduce_scatter(buffers_RBKD, layout, stream, payload_dtype))

    @property
    def started(self) -> int:
        """How many collectives were started, this call included: it takes a number itself."""
        return next(self._numbers)

    def _start(self, start: Callable[[ContextGroupExchange], PendingWork[list[Tensor]]]) -> "_Delayed":
        number = next(self._numbers)
        exchange, seconds = self._exchanges[number % len(self._exchanges)], self._delay(number)
        results: list[list[Tensor]] = []

        def run() -> None:
            time.sleep(seconds)
            results.append(start(exchange).wait())

        thread = threading.Thread(target=run)
        thread.start()
        return _Delayed(thread, results)


@dataclass(frozen=True)
class _Delayed:
    """A collective in a thread."""

    thread: threading.Thread
    results: list[list[Tensor]]

    def wait(self) -> list[Tensor]:
        self.thread.join(timeout=60)
        return self.results[0]
