# SPDX-License-Identifier: Apache-2.0
"""Which rank computes which active block, where they are few and unevenly spread. Pure.

`balanced`: each rank gets the same number of active blocks, give or take one. A block stays with the owner of its
chunk, where its clean keys are, as long as that rank has room. What has to move goes where there is least work, and
blocks then change places until the ranks' pairs differ by no more than the tolerance, or no exchange helps.
"""

import heapq

import numpy as np
import numpy.typing as npt

from megatron_csbp.transformer.geometry.sample import IntArray, Sample
from megatron_csbp.transformer.geometry.scheme import CLEAN, Sharding
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask, visibility

_TOLERANCE = 0.05
_MOST_EXCHANGES = 32

FloatArray = npt.NDArray[np.float64]


def chunk_owners(sample: Sample, sharding: Sharding) -> IntArray:
    """Return the owner of each block's chunk, int64 [B]."""
    per_chunk = sample.num_blocks // sharding.num_chunks
    owners = [sharding.owner_of(chunk) for chunk in range(sharding.num_chunks)]
    return np.repeat(np.array(owners, dtype=np.int64), per_chunk)


def balanced_owners(sample: Sample, sharding: Sharding) -> IntArray:
    """Return the rank of each active block, int64 [V, B], and -1 where a block is not active.

    Pairs are those of full attention: layers with a window cost nearly the same for every block.
    """
    active = sample.active_blocks
    owners = np.full(active.shape, -1, dtype=np.int64)
    views, blocks = np.nonzero(active)
    if not len(blocks):
        return owners
    home = chunk_owners(sample, sharding)
    pairs = _pairs_of_blocks(sample)[blocks]
    clean = np.zeros(sharding.group_size)
    if not sharding.clean_is_replicated:
        np.add.at(clean, home, _clean_pairs_of_blocks(sample))
    owner = _within_quotas(home[blocks], pairs, clean, sharding.group_size)
    _exchange(owner, pairs, clean, sharding.group_size)
    owners[views, blocks] = owner
    return owners


def _pairs_of_blocks(sample: Sample) -> FloatArray:
    """Return the pairs of each block's corrupted rows, float64 [B]."""
    starts = np.arange(sample.num_blocks) * sample.block_size
    seen = visibility(sample, starts, np.zeros_like(starts), Mask(CleanAttention.TOKEN_CAUSAL))
    return (seen.hi - seen.lo + seen.own_stop - seen.own_start).astype(np.float64) * sample.block_size


def _clean_pairs_of_blocks(sample: Sample) -> FloatArray:
    """Return about as many pairs as each block's clean rows have, float64 [B]."""
    starts = np.arange(sample.num_blocks) * sample.block_size
    seen = visibility(sample, starts, np.full_like(starts, CLEAN), Mask(CleanAttention.TOKEN_CAUSAL))
    mean = (seen.hi - seen.lo).astype(np.float64) + sample.block_size / 2
    return np.where(seen.hi > seen.lo, mean * sample.block_size, 0.0)


def _within_quotas(home: IntArray, pairs: FloatArray, clean: FloatArray, group_size: int) -> IntArray:
    """Give each rank its own blocks up to its quota, and the rest, heaviest first, to whoever has least work."""
    count, extra = divmod(len(home), group_size)
    owner = np.full(len(home), -1, dtype=np.int64)
    own = np.bincount(home, minlength=group_size)
    quota = np.full(group_size, count)
    # The ranks with most blocks of their own take the odd ones: those need not move.
    quota[np.argsort(-own, kind="stable")[:extra]] += 1
    for rank in range(group_size):
        mine = np.flatnonzero(home == rank)
        if len(mine) > quota[rank]:
            # Evenly spaced, so that those that stay are neither the light nor the heavy ones.
            mine = mine[np.arange(quota[rank]) * len(mine) // max(1, quota[rank])]
        owner[mine] = rank
    work = clean + np.bincount(owner[owner >= 0], weights=pairs[owner >= 0], minlength=group_size)
    room = quota - np.bincount(owner[owner >= 0], minlength=group_size)
    heap = [(float(work[rank]), rank) for rank in range(group_size) if room[rank] > 0]
    heapq.heapify(heap)
    moving = np.flatnonzero(owner < 0)
    for block in moving[np.argsort(-pairs[moving], kind="stable")].tolist():
        load, rank = heapq.heappop(heap)
        owner[block] = rank
        room[rank] -= 1
        if room[rank] > 0:
            heapq.heappush(heap, (load + float(pairs[block]), rank))
    return owner


def _exchange(owner: IntArray, pairs: FloatArray, clean: FloatArray, group_size: int) -> None:
    """Exchange blocks between the busiest and the idlest rank while that helps, in place."""
    work = clean + np.bincount(owner, weights=pairs, minlength=group_size)
    for _ in range(_MOST_EXCHANGES):
        busy, idle = int(work.argmax()), int(work.argmin())
        gap = work[busy] - work[idle]
        if gap <= _TOLERANCE / 2 * work.max():
            return
        gives, takes = np.flatnonzero(owner == busy), np.flatnonzero(owner == idle)
        if not len(gives) or not len(takes):
            return
        takes = takes[np.argsort(pairs[takes], kind="stable")]
        # For each block to give, the block to take that comes nearest to halving the gap.
        wanted = pairs[gives] - gap / 2
        nearest = np.clip(np.searchsorted(pairs[takes], wanted), 0, len(takes) - 1)
        moved = pairs[gives] - pairs[takes[nearest]]
        best = int(np.abs(moved - gap / 2).argmin())
        if not 0 < moved[best] < gap:
            return
        owner[gives[best]], owner[takes[nearest[best]]] = idle, busy
        work[busy] -= moved[best]
        work[idle] += moved[best]
