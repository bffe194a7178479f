# SPDX-License-Identifier: Apache-2.0
"""Schemes, chunks and their owners, against Megatron's zigzag and the paper's pairing of blocks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.utils import get_batch_on_this_cp_rank

from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import (
    CLEAN,
    BlockAssignment,
    Scheme,
    Sharding,
    length_error,
    required_multiple,
    resolve_scheme,
)
from tests.support.geometry_cases import SCHEMES

CSBP = Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL
SHARDED = [Scheme.CONTEXT_PARALLEL, CSBP]


@pytest.mark.parametrize(
    "context, block, asked, scheme",
    [
        (1, 1, None, Scheme.SINGLE),
        (4, 1, "cp", Scheme.CONTEXT_PARALLEL),
        (1, 4, None, Scheme.BLOCK_PARALLEL),
        (4, 4, None, CSBP),
    ],
)
def test_the_flags_name_the_scheme(context: int, block: int, asked: str | None, scheme: Scheme) -> None:
    assert resolve_scheme(context, block, asked) is scheme


def test_a_context_group_without_a_scheme_is_refused_with_both_choices() -> None:
    with pytest.raises(ValueError, match="--context-parallel-size 4 with --diffusion-block-size and without") as error:
        resolve_scheme(4, 1)
    assert "--bp-size 4 for CSBP" in str(error.value)
    assert "--context-scheme cp" in str(error.value)


@pytest.mark.parametrize("context, block", [(1, 1), (1, 4), (4, 4), (2, 4)])
def test_the_baseline_is_refused_where_it_is_none(context: int, block: int) -> None:
    expected = f"--context-scheme cp is the baseline .* not with --context-parallel-size {context} --bp-size {block}"
    with pytest.raises(ValueError, match=expected):
        resolve_scheme(context, block, "cp")


def test_unequal_sizes_above_one_are_refused_with_sizes_that_work() -> None:
    with pytest.raises(ValueError, match="--block-parallel-size 4 differs from --context-parallel-size 2") as error:
        resolve_scheme(2, 4)
    assert "--context-parallel-size 4 --block-parallel-size 4" in str(error.value)


@pytest.mark.parametrize(
    "context, block, flag",
    [(0, 0, "--context-parallel-size 0"), (1, -1, "--block-parallel-size -1"), (0, 1, "--context-parallel-size 0")],
)
def test_sizes_below_one_are_refused(context: int, block: int, flag: str) -> None:
    with pytest.raises(ValueError, match=f"{flag} must be at least 1"):
        resolve_scheme(context, block)


@pytest.mark.parametrize("scheme", SHARDED)
@pytest.mark.parametrize("size", [2, 4, 7])
def test_dual_end_is_megatrons_zigzag_for_all_copies(
    scheme: Scheme, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = Sample(2 * size * 3 * 2, 3, num_views=2)
    for rank in range(size):
        rows = RankRows(sample, Sharding(size, scheme), rank)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: size)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group, rank=rank: rank)
        whole = {"tokens": torch.arange(sample.length)[None]}
        megatrons = get_batch_on_this_cp_rank(whole, is_hybrid_cp=False, use_per_sequence_balancing=True)
        for copy in (0, 1, CLEAN):
            assert rows.positions[rows.copies == copy].tolist() == megatrons["tokens"][0].tolist()


@given(st.integers(2, 4096), st.data())
def test_dual_end_pairs_each_chunk_with_its_mirror_image(size: int, data: st.DataObject) -> None:
    sharding = Sharding(size, CSBP)
    chunk = data.draw(st.integers(0, 2 * size - 1))
    assert sharding.owner_of(chunk) == sharding.owner_of(2 * size - 1 - chunk)


@given(st.integers(2, 64))
def test_contiguous_gives_each_rank_two_neighbours(size: int) -> None:
    sharding = Sharding(size, CSBP, BlockAssignment.CONTIGUOUS)
    assert [sharding.chunks_of(rank) for rank in range(size)] == [(2 * rank, 2 * rank + 1) for rank in range(size)]


@given(st.integers(2, 64), st.sampled_from(SCHEMES), st.sampled_from(BlockAssignment))
def test_owner_of_is_the_inverse_of_chunks_of(size: int, scheme: Scheme, assignment: BlockAssignment) -> None:
    sharding = Sharding(size, scheme, assignment)
    owned = [chunk for rank in range(size) for chunk in sharding.chunks_of(rank)]
    assert sorted(owned) == list(range(sharding.num_chunks)) == list(range(2 * size))
    assert all(sharding.owner_of(chunk) == rank for rank in range(size) for chunk in sharding.chunks_of(rank))
    assert all(early < late for early, late in map(sharding.chunks_of, range(size)))


def test_one_rank_owns_one_chunk() -> None:
    assert (Sharding().num_chunks, Sharding().chunks_of(0), Sharding().owner_of(0)) == (1, (0,), 0)
    for chunk in (-1, 1):
        with pytest.raises(AssertionError, match=f"chunk {chunk} is not among 1 chunks"):
            Sharding().owner_of(chunk)


def test_schemes_say_who_holds_and_who_sends_clean_keys() -> None:
    said = {
        scheme: (sharding.clean_is_replicated, sharding.shares_clean_keys)
        for scheme in Scheme
        for sharding in [Sharding(1 if scheme is Scheme.SINGLE else 2, scheme)]
    }
    assert said == {
        Scheme.SINGLE: (False, False),
        Scheme.CONTEXT_PARALLEL: (False, True),
        Scheme.BLOCK_PARALLEL: (True, False),
        CSBP: (False, True),
    }


@pytest.mark.parametrize("size, scheme", [(2, Scheme.SINGLE), (0, Scheme.SINGLE), (1, CSBP), (0, CSBP)])
def test_a_scheme_that_does_not_fit_the_ranks_is_refused(size: int, scheme: Scheme) -> None:
    with pytest.raises(ValueError, match=f"scheme {scheme} does not fit a context group of {size} ranks"):
        Sharding(size, scheme)


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 5000))
def test_a_length_error_names_the_multiple_and_the_nearest_lengths_that_work(
    block_size: int, size: int, length: int
) -> None:
    multiple = required_multiple(block_size, size)
    assert multiple == block_size * (1 if size == 1 else 2 * size)
    sharding = Sharding(size, Scheme.SINGLE if size == 1 else CSBP)

    def build(length: int) -> int:
        return RankRows(Sample(length, block_size), sharding).num_rows

    if length % multiple == 0:
        assert build(length) == 2 * length // size
        return
    with pytest.raises(ValueError, match=f"--seq-length {length} must be a multiple of") as error:
        build(length)
    message = str(error.value)
    blocks_fit = length >= block_size and length % block_size == 0
    assert message == length_error(length, block_size, size if blocks_fit else 1)
    message = length_error(length, block_size, size)
    assert str(multiple) in message
    assert str(block_size) in message
    nearest = [int(word) for word in message.rpartition("work: ")[2].rstrip(".").split(" or ")]
    assert nearest == [works for works in (length // multiple * multiple, -(-length // multiple) * multiple) if works]
    assert all(build(works) == 2 * works // size for works in nearest)


def test_a_negative_length_has_the_first_multiple_as_its_nearest() -> None:
    assert length_error(-5, 4, 2).endswith("Nearest lengths that work: 16.")
