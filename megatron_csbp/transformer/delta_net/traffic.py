# SPDX-License-Identifier: Apache-2.0
"""How many bytes a delta-net layer moves: the closed form. Pure: no torch, no Megatron.

Letters: P ranks of the context group, S rows of a rank, B sequences, H value heads of a tensor-parallel rank, K key
dim, V value dim, X channels of the convolution, R rows that it looks back, C rows of a chunk.
"""

from dataclasses import dataclass

from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.scheme import CopyKind, Scheme, Sharding
from megatron_csbp.transformer.traffic_ledger import Collective, Content, Direction, Entry, Volume, Volumes


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
    layer: int, rows: RankRows, sizes: DeltaNetSizes, batch: int, *, training: bool, recomputed: bool
) -> Volumes:
    """Return what one layer has to exchange for one micro-batch.

    Args:
        layer: number of the layer, from 1.
        rows: the rank's rows.
        sizes: of the layer.
        batch: B.
        training: whether a backward pass follows.
        recomputed: whether the forward pass is repeated in it.
    """
    sharding = rows.sharding
    if sharding.scheme is Scheme.CONTEXT_PARALLEL:
        return _by_heads(layer, rows, sizes, batch, training, recomputed)
    if sharding.scheme is not Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL:
        return {}
    rows_sent = min(sizes.look_back, rows.chunk_length)
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
            payload = sharding.num_chunks * chunk_bytes[content] * batch
            _add(volumes, Entry(layer, CopyKind.CLEAN, Collective.GATHER, direction, content), payload, sharding)
    return volumes


def _by_heads(
    layer: int, rows: RankRows, sizes: DeltaNetSizes, batch: int, training: bool, recomputed: bool
) -> Volumes:
    """Return what the CP baseline moves: all features of all rows in, all outputs back, and so their gradients."""
    directions = [Direction.FORWARD] + [Direction.BACKWARD] * ((1 + recomputed) if training else 0)
    volumes: Volumes = {}
    by_copies = {CopyKind.CORRUPTED: rows.num_corrupted_rows, CopyKind.CLEAN: rows.num_rows - rows.num_corrupted_rows}
    for copies, num_rows in by_copies.items():
        for direction in directions:
            for width in (sizes.features, sizes.value_heads * sizes.value_dim):
                payload = num_rows * batch * width * sizes.row_itemsize
                entry = Entry(layer, copies, Collective.ALL_TO_ALL, direction, Content.HEADS)
                _add(volumes, entry, payload, rows.sharding)
    return volumes


def _add(volumes: Volumes, entry: Entry, payload_bytes: int, sharding: Sharding) -> None:
    remote_bytes = payload_bytes // sharding.group_size * (sharding.group_size - 1)
    volumes[entry] = volumes.get(entry, Volume()) + Volume(1, payload_bytes, remote_bytes)


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
