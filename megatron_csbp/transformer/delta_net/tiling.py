# SPDX-License-Identifier: Apache-2.0
"""How kernels cut blocks into tiles, and what states they have alive. Pure: no torch, no Megatron.

Letters: K key dim, V value dim.
"""

LONGEST_TILE = 64
"""Most rows of a tile of the PyTorch kernel."""

_STATE_ITEMSIZE = 4


def tiles_of(block_length: int) -> int:
    """Return the number of tiles of a block; all have the same length."""
    return -(-block_length // LONGEST_TILE)


def tile_length(block_length: int) -> int:
    """Return the rows of a block's tiles; the last rows of the last tile may be padding."""
    return -(-block_length // tiles_of(block_length))


def torch_state_bytes(block_length: int, key_dim: int, value_dim: int) -> int:
    """Return the bytes of states that the PyTorch kernel has alive for a block and head: one for every tile."""
    return tiles_of(block_length) * key_dim * value_dim * _STATE_ITEMSIZE


def fla_state_bytes(key_dim: int, value_dim: int) -> int:
    """Return the same for fla: a state, a map [K, V + K], and the identity that the map starts from."""
    return (value_dim + 2 * (value_dim + key_dim)) * key_dim * _STATE_ITEMSIZE
