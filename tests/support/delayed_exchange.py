# SPDX-License-Identifier: Apache-2.0
"""Fault injection on real process groups: collectives that start late, read late and finish in any order."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_csbp.transformer.communication import ContextGroupExchange, PendingWork, Transfers


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

    def start_gathers(self, tensors_SBKD: Sequence[Tensor], transfers: Transfers) -> "list[_Delayed[list[Tensor]]]":
        return [
            self._start(lambda exchange, one=one: exchange.start_gathers(tensors_SBKD, [one])[0]) for one in transfers
        ]

    def start_reduces(
        self,
        buffers_RBKD: Sequence[Sequence[Tensor]],
        totals_SBKD: Sequence[Tensor],
        transfers: Transfers,
        payload_dtype: torch.dtype,
    ) -> "list[_Delayed[None]]":
        return [
            self._start(
                lambda exchange, one=one, given=given: exchange.start_reduces(
                    [given], totals_SBKD, [one], payload_dtype
                )[0]
            )
            for one, given in zip(transfers, buffers_RBKD, strict=True)
        ]

    @property
    def started(self) -> int:
        """How many collectives were started, this call included: it takes a number itself."""
        return next(self._numbers)

    def _start[T](self, start: Callable[[ContextGroupExchange], PendingWork[T]]) -> "_Delayed[T]":
        number = next(self._numbers)
        exchange, seconds = self._exchanges[number % len(self._exchanges)], self._delay(number)
        started: list[PendingWork[T]] = []

        def run() -> None:
            time.sleep(seconds)
            pending = start(exchange)
            for work in pending.works:
                work.wait()
            started.append(pending)

        thread = threading.Thread(target=run)
        thread.start()
        return _Delayed(thread, started)


@dataclass(frozen=True)
class _Delayed[T]:
    """A collective in a thread; what it brought is added where it belongs by the thread that waits for it."""

    thread: threading.Thread
    started: list[PendingWork[T]]

    def wait(self) -> T:
        self.thread.join(timeout=60)
        return self.started[0].finish()
