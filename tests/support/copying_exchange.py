# SPDX-License-Identifier: Apache-2.0
"""A network of copies of this rank, which tells what happens and can be slow in no way: for tests of the order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from megatron_csbp.transformer.communication import PendingWork, Transfers
from megatron_csbp.transformer.geometry.tiles import Tile
from megatron_csbp.transformer.tile_executor import TileExecutor


def tell_tiles(tell: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call `tell` with `local tile` or `gathered tile` before each tile, forward and backward."""
    for name in ("forward", "backward"):
        run = getattr(TileExecutor, name)

        def told(
            self: TileExecutor, tile: Tile, *rest: object, run: Callable[..., None] = run, **named: object
        ) -> None:
            tell(f"{tile.key_source} tile")
            run(self, tile, *rest, **named)

        monkeypatch.setattr(TileExecutor, name, told)


@dataclass
class CopyingExchange:
    """Gives random rows for gathered keys and adds nothing for gradients.

    Attributes:
        tell: called with what happens: `start gather clean`, `wait gather clean`, and so on.
        gathered: called with the buffers of each gather.
        given: called with the gradients of each reduce-scatter.
    """

    tell: Callable[[str], None] = lambda event: None
    gathered: Callable[[Sequence[Tensor]], None] = lambda buffers: None
    given: Callable[[Sequence[Tensor]], None] = lambda buffers: None
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(3))

    def start_gathers(self, tensors: Sequence[Tensor], transfers: Transfers) -> list[PendingWork[list[Tensor]]]:
        pendings = []
        for copies, transfer in transfers:
            self.tell(f"start gather {copies}")
            buffers = [
                torch.randn(transfer.num_rows, *tensor.shape[1:], generator=self.generator).to(tensor.dtype)
                for tensor in tensors
            ]
            self.gathered(buffers)

            def finish(name: str = copies.value, buffers: list[Tensor] = buffers) -> list[Tensor]:
                self.tell(f"wait gather {name}")
                return buffers

            pendings.append(PendingWork([], finish))
        return pendings

    def start_reduces(
        self,
        buffers: Sequence[Sequence[Tensor]],
        totals: Sequence[Tensor],
        transfers: Transfers,
        payload_dtype: torch.dtype,
    ) -> list[PendingWork[None]]:
        pendings = []
        for (copies, _), some in zip(transfers, buffers, strict=True):
            self.tell(f"start scatter {copies}")
            self.given(some)
            pendings.append(PendingWork([], lambda name=copies.value: self.tell(f"wait scatter {name}")))
        return pendings
