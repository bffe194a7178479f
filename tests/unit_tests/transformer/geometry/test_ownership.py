# SPDX-License-Identifier: Apache-2.0
"""Who computes which active block: equally many, at home where there is room, and of balanced work."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_csbp.transformer.geometry.ownership import balanced_owners, chunk_owners
from megatron_csbp.transformer.geometry.plan import plan_attention
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.sample import Sample, packed_documents
from megatron_csbp.transformer.geometry.scheme import BlockAssignment, Scheme, Sharding
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask
from tests.support.geometry_cases import samples

CSBP, BP = Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL, Scheme.BLOCK_PARALLEL
TOKEN = Mask(CleanAttention.TOKEN_CAUSAL)


@pytest.mark.parametrize("assignment", BlockAssignment)
def test_home_is_the_owner_of_the_chunk(assignment: BlockAssignment) -> None:
    sharding = Sharding(2, CSBP, assignment)
    expected = [0, 0, 1, 1, 1, 1, 0, 0] if assignment is BlockAssignment.DUAL_END else [0] * 4 + [1] * 4
    assert chunk_owners(Sample(24, 3), sharding).tolist() == expected


@given(st.data())
@settings(max_examples=80)
def test_every_active_block_has_one_owner_and_ranks_differ_by_one_block_at_most(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 6))
    sharding = Sharding(size, data.draw(st.sampled_from([CSBP, BP])), data.draw(st.sampled_from(BlockAssignment)))
    sample = data.draw(samples(2 * size * data.draw(st.integers(1, 6)), 2, st.sampled_from([1, 2])))
    owners = balanced_owners(sample, sharding)
    assert ((owners >= 0) == sample.active_blocks).all()
    assert owners.max(initial=-1) < size
    counts = np.bincount(owners[owners >= 0], minlength=size)
    assert counts.max() - counts.min() <= 1
    assert (balanced_owners(sample, sharding) == owners).all(), "all ranks find the same"


def test_blocks_that_are_even_already_stay_at_home() -> None:
    sample, sharding = Sample(256, 2, active=np.ones((1, 128))), Sharding(4, CSBP)
    assert (balanced_owners(sample, sharding)[0] == chunk_owners(sample, sharding)).all()


def test_blocks_of_one_rank_are_spread_over_all() -> None:
    active = np.zeros((1, 128), dtype=bool)
    active[0, :16] = True  # chunk 0: rank 0 alone
    sample, sharding = Sample(256, 2, active=active), Sharding(4, CSBP)
    owners = balanced_owners(sample, sharding)[0, :16]
    assert np.bincount(owners).tolist() == [4, 4, 4, 4]


@pytest.mark.parametrize("scheme, share", [(CSBP, 0.5), (BP, 0.5), (BP, 0.1)])
def test_pairs_of_ranks_with_documents_differ_little(scheme: Scheme, share: float) -> None:
    """At 32K with 20 documents, the busiest rank has at most 10 % more than the mean."""
    rng = np.random.default_rng(0)
    lengths = np.maximum((rng.dirichlet(np.ones(20) * 3) * (32_768 - 20 * 32)).astype(int), 5)
    sample = Sample(32_768, 32, 1, packed_documents(lengths.tolist(), 32), rng.random((1, 1024)) < share)
    sharding = Sharding(8, scheme)

    def busiest(owners: np.ndarray | None) -> float:
        rows = [RankRows(sample, sharding, rank, owners) for rank in range(8)]
        pairs = [plan_attention(r, TOKEN, clean_queries=scheme is CSBP).num_pairs for r in rows]
        return max(pairs) / (sum(pairs) / 8)

    assert busiest(balanced_owners(sample, sharding)) < 1.10
    assert busiest(balanced_owners(sample, sharding)) < busiest(None)


def test_without_active_blocks_there_is_nothing_to_own() -> None:
    assert (balanced_owners(Sample(16, 2, active=np.zeros((1, 8))), Sharding(2, CSBP)) == -1).all()
