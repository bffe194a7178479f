# SPDX-License-Identifier: Apache-2.0
"""What planning costs, in tiles and pieces; time is only guarded, since cores are shared."""

import time

import numpy as np
import pytest

from megatron_csbp.transformer.geometry import plan as module
from megatron_csbp.transformer.geometry.batches import Piece, make_tiles
from megatron_csbp.transformer.geometry.ownership import balanced_owners
from megatron_csbp.transformer.geometry.plan import plan_attention
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.sample import Sample, packed_documents
from megatron_csbp.transformer.geometry.scheme import Scheme, Sharding
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask, WindowAnchor
from tests.support.geometry_cases import SCHEMES

EIGHT = Sharding(8, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL)
LENGTH = 262_144


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[Piece]:
    """All pieces that become tiles."""
    seen: list[Piece] = []

    def watched(given: object) -> object:
        found = list(given)  # type: ignore[call-overload]
        seen.extend(found)
        return make_tiles(found)

    monkeypatch.setattr(module, "make_tiles", watched)
    return seen


def mixed_sample() -> Sample:
    rng = np.random.default_rng(0)
    lengths = np.maximum((rng.dirichlet(np.ones(100) * 3) * (LENGTH - 100 * 32)).astype(int), 5)
    return Sample(LENGTH, 32, 1, packed_documents(lengths.tolist(), 32), rng.random((1, LENGTH // 32)) < 0.2)


@pytest.mark.parametrize("clean_attention", CleanAttention)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_million_tokens_on_64_ranks_have_few_pieces_and_tiles(
    scheme: Scheme, clean_attention: CleanAttention, pieces: list[Piece]
) -> None:
    rows = RankRows(Sample(2**20, 32), Sharding(64, scheme), 5)
    plan = plan_attention(rows, Mask(clean_attention))
    levels = 15 if scheme is Scheme.BLOCK_PARALLEL else 8  # of all 32,768 blocks, or of 256 in a chunk
    assert len(pieces) <= 4 * (levels + 3)
    assert len(plan.tiles) <= 2 * (levels + 3)


@pytest.mark.parametrize("anchor", WindowAnchor)
@pytest.mark.parametrize("window", [1, 7, 1000, 1024, 4096])
def test_a_window_has_few_pieces_whatever_the_length(window: int, anchor: WindowAnchor, pieces: list[Piece]) -> None:
    counts = []
    for length in (LENGTH, 4 * LENGTH):
        pieces.clear()
        plan = plan_attention(
            RankRows(Sample(length, 32), EIGHT, 3), Mask(CleanAttention.TOKEN_CAUSAL, window, anchor)
        )
        counts.append((len(pieces), len(plan.tiles)))
    # Where the window is no multiple of a block, some more at the ends.
    assert counts[1][0] <= 1.25 * counts[0][0] < 500
    assert counts[1][1] <= counts[0][1] + 1


def test_the_calls_of_a_full_layer_are_those_of_its_levels() -> None:
    """10 levels of staircase, one joint batch for each, two diagonals and the prefixes: what was there before."""
    plan = plan_attention(RankRows(Sample(LENGTH, 32), EIGHT, 3), Mask(CleanAttention.TOKEN_CAUSAL))
    assert len(plan.local_tiles) <= 11
    assert len(plan.gathered_tiles) == 2


def test_documents_and_chosen_blocks_make_few_tiles_of_many_pieces(pieces: list[Piece]) -> None:
    sample = mixed_sample()
    owners = balanced_owners(sample, EIGHT)
    plan = plan_attention(RankRows(sample, EIGHT, 3, owners), Mask(CleanAttention.TOKEN_CAUSAL))
    active = int((owners == 3).sum())
    assert active > 150
    assert len(pieces) < 25 * active
    assert len(plan.tiles) < len(pieces)


def test_planning_takes_no_longer_than_a_data_worker_has() -> None:
    """20 ms are asked for on a free core (measured: 16 to 17); the guard is five times that."""
    sample = mixed_sample()
    best = np.inf
    for _ in range(3):
        start = time.process_time()
        rows = RankRows(sample, EIGHT, 3, balanced_owners(sample, EIGHT))
        plan_attention(rows, Mask(CleanAttention.TOKEN_CAUSAL))
        best = min(best, time.process_time() - start)
    assert best < 0.1
