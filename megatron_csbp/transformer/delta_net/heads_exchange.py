# SPDX-License-Identifier: Apache-2.0
"""The CP baseline of delta-net layers: Megatron's all-to-all, which gives each rank all rows of some of the heads.

Like context parallelism that knows nothing of the mask, it moves the rows of both copies.

Shapes: S local rows, P ranks, B micro-batch, F features.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_csbp import megatron_delta_net
from megatron_csbp.transformer.communication import runs_in_backward
from megatron_csbp.transformer.delta_net.from_rows import whole_sequence
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.scheme import CopyKind
from megatron_csbp.transformer.traffic_ledger import Collective, Content, Direction, LayerLedger


class HeadsExchange:
    """Trades rows for heads, and back.

    Attributes:
        plan: what is computed with all rows.
        ledger: where every exchange is entered, or None.
    """

    def __init__(self, group: Any, rows: RankRows, sections: Sequence[int]) -> None:
        """Plan the exchange.

        Args:
            group: the context group.
            rows: the rank's rows, the same for every sample.
            sections: widths of the parts of the features, each of which is cut into P shares of heads.
        """
        self.plan, order = whole_sequence(rows)
        self.ledger: LayerLedger | None = None
        self._group = group
        self._rows = {
            CopyKind.CORRUPTED: rows.num_corrupted_rows,
            CopyKind.CLEAN: rows.num_rows - rows.num_corrupted_rows,
        }
        self._sections = tuple(sections)
        self._order = torch.tensor(order)
        self._inverse = self._order.argsort()

    def all_rows(self, features_SBF: Tensor) -> Tensor:
        """Return all rows of both copies in the order of the plan, with this rank's share of the features."""
        mixed = megatron_delta_net.heads_from_rows(features_SBF, self._sections, self._group)
        self._enter(mixed)
        return mixed[self._order.to(mixed.device)]

    def own_rows(self, features_SBF: Tensor) -> Tensor:
        """Return this rank's rows with all features, given all rows with its share of them."""
        own = megatron_delta_net.rows_from_heads(features_SBF[self._inverse.to(features_SBF.device)], self._group)
        self._enter(own)
        return own

    def share_of_channels(
        self, weights: tuple[Tensor, Tensor | None], sections: list[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Return the convolution's weight and bias for this rank's share of the heads."""
        weight, bias = weights
        share = megatron_delta_net.share_of_heads
        return share(weight, self._group, sections), None if bias is None else share(bias, self._group, sections)

    def share_of_heads(self, weights: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return parameters that have an entry for each head, for this rank's share of them."""
        first, second = (megatron_delta_net.share_of_heads(weight, self._group) for weight in weights)
        return first, second

    def _enter(self, received: Tensor) -> None:
        """Enter an exchange, and that of its gradient once there is one."""
        ledger, nbytes = self.ledger, received.nbytes
        if ledger is None:
            return
        size = self._group.size()

        def enter(direction: Direction) -> None:
            for copies, rows in self._rows.items():
                payload_bytes = nbytes // sum(self._rows.values()) * rows
                remote_bytes = payload_bytes // size * (size - 1)
                ledger.add(copies, Collective.ALL_TO_ALL, direction, payload_bytes, remote_bytes, Content.HEADS)

        enter(Direction.BACKWARD if runs_in_backward() else Direction.FORWARD)
        if received.requires_grad:
            received.register_hook(lambda grad: enter(Direction.BACKWARD))  # type: ignore[no-untyped-call]
