# SPDX-License-Identifier: Apache-2.0
"""How many bytes a delta-net layer moves: the closed form. Pure: no torch, no Megatron.

Letters: P ranks of the context group, S rows of a rank, B sequences, H value heads of a tensor-parallel rank, K key
dim, V value dim, X channels of the convolution, R rows that it looks back, C rows of a chunk.
"""

from dataclasses import dataclass

from megatron_csbp.transformer.layout import Scheme, SequenceLayout, Stream
from megatron_csbp.transformer.traffic_ledger import Collective, Content, Direction, Transfer, Volume, Volumes


@dataclass(frozen=True, kw_only=True)
class DeltaNetSizes:
    """Sizes of a layer on one tensor-parallel rank.

    Attributes:
        key_heads: heads of queries and keys.
        value_heads: H.
        key_dim: K.
        value_dim: V.
        look_back: R.
        row_itemsize: bytes of a number of a row.
        state_itemsize: bytes of a number of a state.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    look_back: int = 3
    row_itemsize: int = 2
    state_itemsize: int = 4

    @property
    def channels(self) -> int:
        """X: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def features(self) -> int:
        """Width of the input projection: the channels, the output gate, and two numbers for each head."""
        return self.channels + self.value_heads * (self.value_dim + 2)

    @property
    def map_bytes(self) -> int:
        """Bytes of the affine map of a chunk, for one sequence: K x K and K x V for each head."""
        return self.value_heads * self.key_dim * (self.key_dim + self.value_dim) * self.state_itemsize

    def halo_bytes(self, rows: int) -> int:
        """Return the bytes of rows that the convolution looks back on, for one sequence."""
        return rows * self.channels * self.row_itemsize


def layer_volumes(
    layer: int, layout: SequenceLayout, sizes: DeltaNetSizes, batch: int, *, training: bool, recomputed: bool
) -> Volumes:
    """Return what one layer has to exchange for one micro-batch.

    Args:
        layer: number of the layer, from 1.
        layout: the rank's rows.
        sizes: of the layer.
        batch: B.
        training: whether a backward pass follows.
        recomputed: whether the forward pass is repeated in it.
    """
    if layout.scheme is Scheme.CONTEXT_PARALLEL:
        return _by_heads(layer, layout, sizes, batch, training, recomputed)
    if layout.scheme is not Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL:
        return {}
    rows_sent = min(sizes.look_back, layout.chunk_length)
    forward = {
        Content.STATE_MAPS: sizes.map_bytes,
        Content.CONVOLUTION_ROWS: sizes.halo_bytes(rows_sent),
    }
    # Backward carries K x K again with the gradient of the states, K x V, and the gradient of all rows looked back on.
    backward = {**forward, Content.CONVOLUTION_ROWS: sizes.halo_bytes(sizes.look_back)}
    volumes: Volumes = {}
    for content in forward:
        passes = [(Direction.FORWARD, forward)]
        if training:
            passes += [(Direction.BACKWARD, backward)] + [(Direction.BACKWARD, forward)] * recomputed
        for direction, chunk_bytes in passes:
            payload = layout.num_chunks * chunk_bytes[content] * batch
            _add(volumes, Transfer(layer, Stream.CLEAN, Collective.GATHER, direction, content), payload, layout)
    return volumes


def _by_heads(
    layer: int, layout: SequenceLayout, sizes: DeltaNetSizes, batch: int, training: bool, recomputed: bool
) -> Volumes:
    """Return what the CP baseline moves: all features of all rows in, all outputs back, and so their gradients."""
    directions = [Direction.FORWARD] + [Direction.BACKWARD] * ((1 + recomputed) if training else 0)
    volumes: Volumes = {}
    for stream in Stream:
        for direction in directions:
            for width in (sizes.features, sizes.value_heads * sizes.value_dim):
                payload = layout.num_rows // 2 * batch * width * sizes.row_itemsize
                transfer = Transfer(layer, stream, Collective.ALL_TO_ALL, direction, Content.HEADS)
                _add(volumes, transfer, payload, layout)
    return volumes


def _add(volumes: Volumes, transfer: Transfer, payload_bytes: int, layout: SequenceLayout) -> None:
    remote_bytes = payload_bytes // layout.group_size * (layout.group_size - 1)
    volumes[transfer] = volumes.get(transfer, Volume()) + Volume(1, payload_bytes, remote_bytes)


def break_even_tokens(group_size: int, sizes: DeltaNetSizes) -> float:
    """Return the length L below which an all-to-all of the clean rows by heads would move less than state maps.

    The all-to-all moves (P-1)/P of L/P rows of all features there and of all outputs back; the maps are 2 (P-1).

    Args:
        group_size: P.
        sizes: of the layer.
    """
    of_maps = 2 * (group_size - 1) * (sizes.map_bytes + sizes.halo_bytes(sizes.look_back))
    row_bytes = (sizes.features + sizes.value_heads * sizes.value_dim) * sizes.row_itemsize
    return of_maps / ((group_size - 1) / group_size**2 * row_bytes)
