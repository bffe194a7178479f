# SPDX-License-Identifier: Apache-2.0
"""Random samples, shardings and masks for property tests."""

import numpy as np
from hypothesis import strategies as st

from megatron_csbp.transformer.geometry.ownership import balanced_owners
from megatron_csbp.transformer.geometry.sample import IntArray, Sample
from megatron_csbp.transformer.geometry.scheme import BlockAssignment, Scheme, Sharding
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask, WindowAnchor
from tests.support.plan_check import Group

SCHEMES = (Scheme.CONTEXT_PARALLEL, Scheme.BLOCK_PARALLEL, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL)


@st.composite
def documents(draw: st.DrawFn, num_blocks: int, block_size: int) -> IntArray:
    """Documents that start at blocks, with short last blocks and padding between them, before and behind."""
    starts = sorted(draw(st.sets(st.integers(0, num_blocks - 1), min_size=1, max_size=6)))
    bounds = []
    for start, limit in zip(starts, [*starts[1:], num_blocks], strict=True):
        length = draw(st.integers(1, (limit - start) * block_size))
        bounds.append((start * block_size, start * block_size + length))
    return np.array(bounds, dtype=np.int64)


@st.composite
def samples(draw: st.DrawFn, length_in_blocks: int, block_size: int, views: st.SearchStrategy[int]) -> Sample:
    """Samples of one length, static or not."""
    num_views = draw(views)
    which = draw(st.sampled_from(["static", "documents", "active", "both"]))
    docs = draw(documents(length_in_blocks, block_size)) if which in ("documents", "both") else None
    active = None
    if which in ("active", "both"):
        share = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
        seed = draw(st.integers(0, 2**16))
        active = np.random.default_rng(seed).random((num_views, length_in_blocks)) < share
    return Sample(length_in_blocks * block_size, block_size, num_views, docs, active)


def masks(length: int, block_size: int) -> st.SearchStrategy[Mask]:
    """Masks with and without windows, among them those around a block, a chunk and the whole length."""
    notable = [1, 2, 3, block_size, block_size + 1, 2 * block_size - 1, 3 * block_size + 5, length, 2 * length]
    windows = st.none() | st.sampled_from(notable) | st.integers(1, length)
    return st.builds(Mask, st.sampled_from(CleanAttention), windows, st.sampled_from(WindowAnchor))


@st.composite
def groups(draw: st.DrawFn, sizes: st.SearchStrategy[int], most_blocks_per_chunk: int, most_rows: int = 4) -> Group:
    """Whole groups; active blocks are balanced over the ranks or stay where their chunks are."""
    size = draw(sizes)
    scheme = Scheme.SINGLE if size == 1 else draw(st.sampled_from(SCHEMES))
    sharding = Sharding(size, scheme, draw(st.sampled_from(BlockAssignment)))
    block = draw(st.integers(1, most_rows))
    blocks = draw(st.integers(1, most_blocks_per_chunk)) * sharding.num_chunks
    sample = draw(samples(blocks, block, st.sampled_from([1, 1, 2, 3])))
    owners = None
    movable = sample.active is not None and scheme not in (Scheme.SINGLE, Scheme.CONTEXT_PARALLEL)
    if movable and draw(st.booleans()):
        owners = balanced_owners(sample, sharding)
    return Group(sample, sharding, draw(masks(sample.length, block)), owners, draw(st.booleans()))
