# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule in PyTorch, tile by tile: for the CPU, and as the reference of other kernels.

A block is cut into equal tiles of at most 64 rows. Within a tile the rows' corrections of each other are one
triangular solve (the WY form), all tiles at once; only the state goes from tile to tile. Nothing loops over rows.

Shapes: G sequences, T rows of a sequence, H heads, E = G H sequences of one head, N tiles of a sequence, C rows of a
tile, K key dim, V value dim, J blocks of a sequence, W width of what is carried (V, or V + K for affine maps).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_csbp.transformer.delta_net.rows import DeltaRows, Keeps, state_dtype
from megatron_csbp.transformer.delta_net.tiling import tile_length, tiles_of, torch_state_bytes


@dataclass(frozen=True)
class _Tiles:
    """The tiles of some sequences, with all that does not depend on the state.

    Attributes:
        write_NECV: what each row writes if the state before its tile is 0.
        erase_NECK: how the state S before its tile changes that: a row writes `write - erase S`.
        key_NECK: keys, decayed to the end of the tile.
        decay_NE: decay over the tile.
        query_NECK: scaled queries, with the decay since the start of the tile.
        score_NECC: weights with which a row reads what the rows of its tile have written.
    """

    write_NECV: Tensor
    erase_NECK: Tensor
    key_NECK: Tensor
    decay_NE: Tensor
    query_NECK: Tensor
    score_NECC: Tensor


class TorchDeltaRule:
    """See `DeltaRuleKernel`. Computes in fp32, or in fp64 for fp64 rows."""

    @property
    def name(self) -> str:
        """See `DeltaRuleKernel.name`."""
        return "torch"

    def state_bytes_of_block(self, block_length: int, key_dim: int, value_dim: int) -> int:
        """See `DeltaRuleKernel.state_bytes_of_block`: every tile has a state, counted as fp32."""
        return torch_state_bytes(block_length, key_dim, value_dim)

    def clean(
        self, rows: DeltaRows, state_GHKV: Tensor, block_length: int, keeps: Keeps
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `DeltaRuleKernel.clean`."""
        tiles = _tiles(rows, block_length)
        arriving_NEKV, written_NECV, last_EKV = _run(tiles, state_GHKV.flatten(0, 1), _tile_keeps(tiles, rows, keeps))
        out_GTHV = _out(tiles, arriving_NEKV, written_NECV, rows, block_length)
        starts_JEKV = arriving_NEKV[:: tiles_of(block_length)]
        starts_GJHKV = torch.unflatten(starts_JEKV, 1, state_GHKV.shape[:2]).transpose(0, 1)
        return out_GTHV, starts_GJHKV, last_EKV.view_as(state_GHKV)

    def blocks(self, rows: DeltaRows, state_GHKV: Tensor) -> Tensor:
        """See `DeltaRuleKernel.blocks`."""
        length = rows.key_GTHK.shape[1]
        tiles = _tiles(rows, length)
        arriving_NEKV, written_NECV, _ = _run(tiles, state_GHKV.flatten(0, 1), None)
        return _out(tiles, arriving_NEKV, written_NECV, rows, length)

    def advance(self, rows: DeltaRows, map_GHKW: Tensor, block_length: int, keeps: Keeps) -> Tensor:
        """See `DeltaRuleKernel.advance`."""
        tiles = _tiles(rows, block_length)
        _, _, last_EKW = _run(tiles, map_GHKW.flatten(0, 1), _tile_keeps(tiles, rows, keeps))
        return last_EKW.view_as(map_GHKW)


def _tiled(tensor_GTHD: Tensor, block_length: int, dtype: torch.dtype) -> Tensor:
    """Return rows as tiles [N, E, C, D] of `dtype`; the last rows of a block's last tile may be padding, 0."""
    tiles, length = tiles_of(block_length), tile_length(block_length)
    blocks_GJMHD = torch.unflatten(tensor_GTHD.to(dtype), 1, (-1, block_length))
    padding = tiles * length - block_length
    if padding:
        blocks_GJMHD = F.pad(blocks_GJMHD, (0, 0, 0, 0, 0, padding))
    tiles_GNCHD = torch.unflatten(blocks_GJMHD.flatten(1, 2), 1, (-1, length))
    return tiles_GNCHD.permute(1, 0, 3, 2, 4).flatten(1, 2).contiguous()


def _tiles(rows: DeltaRows, block_length: int) -> _Tiles:
    """Cut rows into tiles and compute what needs no state. Padding rows write nothing and decay nothing."""
    dtype = state_dtype(rows.value_GTHV.dtype)
    vectors = (rows.query_GTHK, rows.key_GTHK, rows.value_GTHV)
    query_NECK, key_NECK, value_NECV = (_tiled(tensor, block_length, dtype) for tensor in vectors)
    # In fp64: the gradient of a row's decay is a sum in which all pairs of rows behind it cancel.
    since_NEC = _tiled(rows.log_decay_GTH[..., None], block_length, torch.float64).squeeze(-1).cumsum(-1)
    beta_NEC1 = _tiled(rows.beta_GTH[..., None], block_length, dtype)
    length = since_NEC.shape[-1]
    later = torch.ones(length, length, dtype=torch.bool, device=since_NEC.device).triu(1)
    # Masked before exp: the decay between a row and a later one would be a growth, which may overflow.
    decay_NECC = (since_NEC[..., :, None] - since_NEC[..., None, :]).masked_fill(later, -torch.inf).exp().to(dtype)
    decay_NEC1 = since_NEC.exp().to(dtype)[..., None]
    key_T_NEKC = key_NECK.transpose(-1, -2)
    mutual_NECC = (key_NECK @ key_T_NEKC) * decay_NECC * beta_NEC1
    query_NECK = query_NECK * rows.scale
    # The diagonal of ones is implied, the upper triangle is not read.
    solved = torch.linalg.solve_triangular(
        mutual_NECC,
        torch.cat([value_NECV * beta_NEC1, key_NECK * (beta_NEC1 * decay_NEC1)], -1),
        upper=False,
        unitriangular=True,
    )
    write_NECV, erase_NECK = torch.split(solved, [value_NECV.shape[-1], key_NECK.shape[-1]], -1)
    return _Tiles(
        write_NECV=write_NECV,
        erase_NECK=erase_NECK,
        key_NECK=key_NECK * (since_NEC[..., -1:] - since_NEC).exp().to(dtype)[..., None],
        decay_NE=since_NEC[..., -1].exp().to(dtype),
        query_NECK=query_NECK * decay_NEC1,
        score_NECC=(query_NECK @ key_T_NEKC) * decay_NECC,
    )


def _tile_keeps(tiles: _Tiles, rows: DeltaRows, keeps: Keeps) -> list[Tensor | None]:
    """Return for every tile the factors [E, 1, 1] on the state that arrives, or None where all keep it."""
    heads = rows.key_GTHK.shape[2]
    num_tiles, num_blocks = tiles.decay_NE.shape[0], len(keeps[0])
    factors: list[Tensor | None] = [None] * num_tiles
    for block in range(num_blocks):
        kept = [float(sequence[block]) for sequence in keeps]
        if not all(kept):
            factor_G = tiles.decay_NE.new_tensor(kept)
            factors[block * (num_tiles // num_blocks)] = factor_G.repeat_interleave(heads)[:, None, None]
    return factors


def _run(tiles: _Tiles, carried_EKW: Tensor, keeps: list[Tensor | None] | None) -> tuple[Tensor, Tensor, Tensor]:
    """Carry a state, or affine maps, from tile to tile.

    Returns:
        What arrives at each tile [N, E, K, W], what its rows write [N, E, C, W], and what leaves the last [E, K, W].
    """
    wider = carried_EKW.shape[-1] - tiles.write_NECV.shape[-1]
    writes = F.pad(tiles.write_NECV, (0, wider)) if wider else tiles.write_NECV
    arriving, written = [], []
    # unbind, since indexing would fill a gradient of all tiles for each tile
    steps = zip(
        writes.unbind(), tiles.erase_NECK.unbind(), tiles.key_NECK.unbind(), tiles.decay_NE.unbind(), strict=True
    )
    for tile, (write_ECW, erase_ECK, key_ECK, decay_E) in enumerate(steps):
        keep_E11 = None if keeps is None else keeps[tile]
        if keep_E11 is not None:
            carried_EKW = carried_EKW * keep_E11
        arriving.append(carried_EKW)
        written_ECW = torch.baddbmm(write_ECW, erase_ECK, carried_EKW, alpha=-1)
        written.append(written_ECW)
        carried_EKW = torch.baddbmm(carried_EKW * decay_E[:, None, None], key_ECK.transpose(-1, -2), written_ECW)
    return torch.stack(arriving), torch.stack(written), carried_EKW


def _out(tiles: _Tiles, state_NEKV: Tensor, written_NECV: Tensor, rows: DeltaRows, block_length: int) -> Tensor:
    """Read the states: the outputs [G, T, H, V] in the dtype of the values."""
    out_NECV = tiles.query_NECK @ state_NEKV + tiles.score_NECC @ written_NECV
    sequences, length, heads, value_dim = rows.value_GTHV.shape
    blocks = length // block_length
    out_GJMHV = (
        torch.unflatten(out_NECV, 1, (sequences, heads))
        .permute(1, 0, 3, 2, 4)
        .reshape(sequences, blocks, -1, heads, value_dim)[:, :, :block_length]
    )
    return out_GJMHV.reshape(sequences, length, heads, value_dim).to(rows.value_GTHV.dtype)
