# SPDX-License-Identifier: Apache-2.0
"""What collectives moved: tensors, layer, collective, pass, bytes. Pure: no torch, no Megatron."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from megatron_csbp.transformer.geometry.scheme import CopyKind


class Collective(StrEnum):
    """What an exchange does."""

    GATHER = "gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"


class Content(StrEnum):
    """What an exchange carries."""

    KEY_VALUE = "K/V"
    STATE_MAPS = "state maps"
    CONVOLUTION_ROWS = "convolution rows"
    HEADS = "rows by heads"


class Direction(StrEnum):
    """In which pass an exchange runs; the forward pass that recomputation repeats runs in the backward pass."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, order=True)
class Entry:
    """One kind of exchange.

    Attributes:
        layer: number of the decoder layer, from 1.
        copies: the copies whose tensors, or their gradients, travel.
        collective: what is done with them.
        direction: the pass.
        content: what they are.
    """

    layer: int
    copies: CopyKind
    collective: Collective
    direction: Direction
    content: Content = Content.KEY_VALUE

    @property
    def tensors(self) -> str:
        """The tensors that travel: keys and values are gathered, their gradients are reduce-scattered."""
        if self.content is not Content.KEY_VALUE:
            return f"{self.copies} {self.content}"
        return f"{self.copies} {'K/V' if self.collective is Collective.GATHER else 'dK/dV'}"


@dataclass(frozen=True)
class Volume:
    """How much was moved.

    Attributes:
        exchanges: exchanges started; keys and values of one copy together are one.
        payload_bytes: all ranks' shares of the buffers, this rank's own among them.
        remote_bytes: the part of the payload that other ranks send to this one.
    """

    exchanges: int = 0
    payload_bytes: int = 0
    remote_bytes: int = 0

    def __add__(self, other: "Volume") -> "Volume":
        return Volume(
            self.exchanges + other.exchanges,
            self.payload_bytes + other.payload_bytes,
            self.remote_bytes + other.remote_bytes,
        )

    def times(self, factor: int) -> "Volume":
        """Return the volume of `factor` equal exchanges."""
        return Volume(factor * self.exchanges, factor * self.payload_bytes, factor * self.remote_bytes)


type Volumes = dict[Entry, Volume]


class TrafficLedger:
    """Adds up what collectives move, by kind of transfer.

    Attributes:
        volumes: what was moved so far.
    """

    def __init__(self) -> None:
        self.volumes: Volumes = {}

    def add(self, transfer: Entry, volume: Volume) -> None:
        """Enter one transfer."""
        self.volumes[transfer] = self.volumes.get(transfer, Volume()) + volume

    def take(self) -> Volumes:
        """Return what was entered since the last call, and start anew."""
        taken, self.volumes = self.volumes, {}
        return taken


@dataclass(frozen=True)
class LayerLedger:
    """The ledger as one layer's exchange sees it.

    Attributes:
        ledger: where entries go.
        layer: number of the layer, from 1.
    """

    ledger: TrafficLedger
    layer: int

    def add(
        self,
        copies: CopyKind,
        collective: Collective,
        direction: Direction,
        payload_bytes: int,
        remote_bytes: int,
        content: Content = Content.KEY_VALUE,
    ) -> None:
        """Enter one exchange of this layer."""
        entry = Entry(self.layer, copies, collective, direction, content)
        self.ledger.add(entry, Volume(1, payload_bytes, remote_bytes))


def total(volumes: Iterable[Volume]) -> Volume:
    """Return the sum of volumes."""
    return sum(volumes, Volume())
