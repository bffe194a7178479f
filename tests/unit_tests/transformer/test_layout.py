# SPDX-License-Identifier: Apache-2.0
"""Layouts against Megatron's zigzag, the paper's pairing of blocks, and the sizes that users may give."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron_csbp.transformer.layout import (
    BlockAssignment,
    Scheme,
    SequenceLayout,
    Stream,
    length_error,
    required_multiple,
    resolve_scheme,
)

SHARDED = [Scheme.CONTEXT_PARALLEL, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL]
DISTRIBUTED = [*SHARDED, Scheme.BLOCK_PARALLEL]


def group_layouts(
    scheme: Scheme, group_size: int, block_size: int, blocks_per_chunk: int, assignment: BlockAssignment
) -> list[SequenceLayout]:
    return [
        SequenceLayout(
            sequence_length=2 * group_size * block_size * blocks_per_chunk,
            block_size=block_size,
            group_size=group_size,
            rank=rank,
            scheme=scheme,
            assignment=assignment,
        )
        for rank in range(group_size)
    ]


def groups(assignments: st.SearchStrategy[BlockAssignment]) -> st.SearchStrategy[list[SequenceLayout]]:
    sizes = (st.integers(2, 9), st.integers(1, 5), st.integers(1, 5))
    return st.builds(group_layouts, st.sampled_from(DISTRIBUTED), *sizes, assignments)


layouts_of_a_group = groups(st.sampled_from(BlockAssignment))


@pytest.mark.parametrize(
    "context, block, scheme",
    [
        (1, 1, Scheme.SINGLE),
        (4, 1, Scheme.CONTEXT_PARALLEL),
        (1, 4, Scheme.BLOCK_PARALLEL),
        (4, 4, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL),
    ],
)
def test_the_pair_of_sizes_names_the_scheme(context: int, block: int, scheme: Scheme) -> None:
    assert resolve_scheme(context, block) is scheme


def test_unequal_sizes_above_one_are_refused_with_sizes_that_work() -> None:
    with pytest.raises(ValueError, match="--block-parallel-size 4 differs from --context-parallel-size 2") as error:
        resolve_scheme(2, 4)
    assert "--context-parallel-size 4 --block-parallel-size 4" in str(error.value)


@pytest.mark.parametrize(
    "context, block, flag", [(0, 0, "--context-parallel-size 0"), (1, -1, "--block-parallel-size -1")]
)
def test_sizes_below_one_are_refused(context: int, block: int, flag: str) -> None:
    with pytest.raises(ValueError, match=f"{flag} must be at least 1"):
        resolve_scheme(context, block)


@pytest.mark.parametrize("scheme", SHARDED)
@pytest.mark.parametrize("group_size", [2, 4, 7])
def test_dual_end_is_megatrons_zigzag_for_both_copies(
    scheme: Scheme, group_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for layout in group_layouts(scheme, group_size, 3, 2, BlockAssignment.DUAL_END):
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: group_size)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group, rank=layout.rank: rank)
        whole = {"tokens": torch.arange(layout.sequence_length)[None]}
        megatrons = get_batch_on_this_cp_rank(whole, is_hybrid_cp=False, use_per_sequence_balancing=True)
        for copy in (layout.is_corrupted, ~layout.is_corrupted):
            assert layout.positions[copy].tolist() == megatrons["tokens"][0].tolist()


@given(groups(st.just(BlockAssignment.DUAL_END)))
def test_dual_end_pairs_each_block_with_its_mirror_image(layouts: list[SequenceLayout]) -> None:
    owner = dict(layouts[0].owners())
    assert list(owner) == list(range(layouts[0].num_blocks))
    last = layouts[0].num_blocks - 1
    assert all(owner[block] == owner[last - block] for block in owner)
    for layout in layouts:
        blocks = layout.owned_positions.reshape(-1, layout.block_size)[:, 0] // layout.block_size
        assert all(owner[int(block)] == layout.rank for block in blocks)


@given(groups(st.just(BlockAssignment.CONTIGUOUS)))
def test_contiguous_gives_each_rank_one_stretch(layouts: list[SequenceLayout]) -> None:
    share = layouts[0].sequence_length // layouts[0].group_size
    for layout in layouts:
        assert layout.owned_positions.tolist() == list(range(layout.rank * share, (layout.rank + 1) * share))


@given(layouts_of_a_group)
def test_every_row_of_either_copy_counts_on_exactly_one_rank(layouts: list[SequenceLayout]) -> None:
    counted = Counter(
        (bool(corrupted), int(position))
        for layout in layouts
        for corrupted, position, counts in zip(layout.is_corrupted, layout.positions, layout.is_counted, strict=True)
        if counts
    )
    assert counted == Counter((copy, i) for copy in (False, True) for i in range(layouts[0].sequence_length))


@given(layouts_of_a_group)
def test_rows_are_segments_of_consecutive_positions(layouts: list[SequenceLayout]) -> None:
    for layout in layouts:
        assert layout.segments[0].first_row == 0
        assert sum(segment.length for segment in layout.segments) == layout.num_rows == len(layout.positions)
        for segment in layout.segments:
            rows = slice(segment.first_row, segment.first_row + segment.length)
            assert (np.diff(layout.positions[rows]) == 1).all()
            assert layout.positions[segment.first_row] == segment.first_position
            assert (layout.is_corrupted[rows] == (segment.stream is Stream.CORRUPTED)).all()
    expected = 2 if layouts[0].scheme in SHARDED else layouts[0].group_size + 1
    assert layouts[0].group_rows == expected * layouts[0].sequence_length


@given(layouts_of_a_group)
def test_owner_of_is_the_inverse_of_chunks_of(layouts: list[SequenceLayout]) -> None:
    layout = layouts[0]
    owned = [chunk for rank in range(layout.group_size) for chunk in layout.chunks_of(rank)]
    assert sorted(owned) == list(range(layout.num_chunks))
    assert all(layout.owner_of(chunk) == rank for rank in range(layout.group_size) for chunk in layout.chunks_of(rank))


def test_first_row_finds_owned_chunks_and_no_others() -> None:
    layout = group_layouts(Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL, 4, 2, 3, BlockAssignment.DUAL_END)[1]
    assert [layout.first_row(Stream.CORRUPTED, 1), layout.first_row(Stream.CLEAN, 6)] == [0, 18]
    with pytest.raises(KeyError, match="rank 1 holds no clean rows of chunk 2"):
        layout.first_row(Stream.CLEAN, 2)


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 5000))
def test_a_length_error_names_the_multiple_and_the_nearest_lengths_that_work(
    block_size: int, group_size: int, length: int
) -> None:
    multiple = required_multiple(block_size, group_size)
    scheme = Scheme.SINGLE if group_size == 1 else Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL

    def build(sequence_length: int) -> SequenceLayout:
        return SequenceLayout(
            sequence_length=sequence_length, block_size=block_size, group_size=group_size, scheme=scheme
        )

    if length % multiple == 0:
        assert build(length).num_blocks * block_size == length
        return
    with pytest.raises(ValueError, match=f"--seq-length {length} must be a multiple of") as error:
        build(length)
    message = str(error.value)
    assert message == length_error(length, block_size, group_size)
    assert str(multiple) in message
    assert str(block_size) in message
    nearest = [int(word) for word in message.rpartition("work: ")[2].rstrip(".").split(" or ")]
    assert nearest == [works for works in (length // multiple * multiple, -(-length // multiple) * multiple) if works]
    assert all(build(works).sequence_length == works for works in nearest)


def test_other_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--diffusion-block-size 0 must be at least 1 token; 32"):
        SequenceLayout(sequence_length=64, block_size=0)
    with pytest.raises(ValueError, match="rank 2 is not in a context group of 2 ranks"):
        SequenceLayout(sequence_length=64, block_size=4, group_size=2, rank=2, scheme=Scheme.BLOCK_PARALLEL)
    with pytest.raises(ValueError, match="scheme one rank does not fit a context group of 2 ranks"):
        SequenceLayout(sequence_length=64, block_size=4, group_size=2)
    with pytest.raises(ValueError, match="scheme CSBP does not fit a context group of 1 ranks"):
        SequenceLayout(sequence_length=64, block_size=4, scheme=Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL)
