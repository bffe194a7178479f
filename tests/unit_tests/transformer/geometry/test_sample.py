# SPDX-License-Identifier: Apache-2.0
"""Block tables: documents, views, active blocks, padding, and what is refused."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_csbp.transformer.geometry.sample import Sample, active_from_blocks, packed_documents
from megatron_csbp.transformer.geometry.scheme import CLEAN
from tests.support.geometry_cases import samples


def test_without_more_a_sample_is_one_document_of_active_blocks() -> None:
    sample = Sample(24, 4, 2)
    assert sample.is_static
    assert sample.documents.tolist() == [[0, 24]]
    assert sample.num_blocks == 6
    assert sample.active_blocks.shape == (2, 6)
    assert sample.active_blocks.all()
    assert list(sample.views) == [0, 1]
    assert sample.copies == (0, 1, CLEAN)


@pytest.mark.parametrize(
    "changes",
    [
        {"documents": np.array([(0, 23)])},
        {"documents": np.array([(4, 24)])},
        {"documents": np.array([(0, 12), (12, 24)])},
        {"active": np.ones((1, 6), dtype=bool)},
    ],
)
def test_documents_and_choices_of_blocks_are_not_static(changes: dict[str, Any]) -> None:
    assert not Sample(24, 4, **changes).is_static


def test_blocks_of_padding_are_never_active() -> None:
    documents = np.array([(4, 9), (16, 18)])
    inside = [False, True, True, False, True, False]
    assert Sample(24, 4, documents=documents).active_blocks.tolist() == [inside]
    chosen = Sample(24, 4, 2, documents, np.array([[True] * 6, [False, True] * 3]))
    assert chosen.active_blocks.tolist() == [inside, [False, True, False, False, False, False]]


def test_positions_have_the_document_before_or_at_them() -> None:
    sample = Sample(24, 4, documents=np.array([(4, 9), (16, 18)]))
    assert sample.document_of(np.array([0, 3, 4, 9, 15, 16, 23])).tolist() == [-1, -1, 0, 0, 0, 1, 1]


@given(st.data())
def test_documents_within_are_those_with_blocks_there(data: st.DataObject) -> None:
    sample = data.draw(samples(12, 3, st.just(1)))
    start, stop = sorted(data.draw(st.tuples(st.integers(0, 11), st.integers(1, 12))))
    start, stop = 3 * min(start, stop - 1), 3 * stop
    expected = [
        (first, last, -(-last // 3) * 3)
        for first, last in sample.documents.tolist()
        if first < stop and -(-last // 3) * 3 > start
    ]
    assert sample.documents_within(start, stop) == expected


def test_packed_documents_start_at_the_next_block() -> None:
    assert packed_documents([5, 4, 1], 4).tolist() == [[0, 5], [8, 12], [12, 13]]
    assert packed_documents([], 4).shape == (0, 2)


def test_active_from_blocks_takes_numbers_view_by_view() -> None:
    assert active_from_blocks([(0, 2), ()], 3).tolist() == [[True, False, True], [False, False, False]]


def test_the_key_is_the_content() -> None:
    documents, active = np.array([(0, 8), (8, 23)]), np.eye(1, 6, dtype=bool)
    variants = [
        Sample(24, 4),
        Sample(24, 4, documents=documents),
        Sample(24, 4, documents=np.array([(0, 8), (8, 24)])),
        Sample(24, 4, active=active),
        Sample(24, 4, active=~active),
        Sample(24, 4, documents=documents, active=active),
        Sample(24, 4, 2),
        Sample(24, 8),
        Sample(48, 4),
    ]
    assert len({sample.key for sample in variants}) == len(variants)
    assert Sample(24, 4, documents=documents.tolist(), active=active.tolist()).key == variants[5].key  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"length": 64, "block_size": 0}, r"--diffusion-block-size 0 must be at least 1 token; 32"),
        ({"length": 63, "block_size": 4}, "--seq-length 63 must be a multiple of"),
        ({"length": 0, "block_size": 4}, "--seq-length 0 must be a multiple of"),
        ({"length": -4, "block_size": 4}, "--seq-length -4 must be a multiple of"),
        ({"length": 64, "block_size": 4, "num_views": 0}, "0 corrupted views: a sample has at least 1"),
        ({"length": 8, "block_size": 4, "active": np.ones((1, 3))}, r"have shape \(1, 3\), not \(1, 2\)"),
        ({"length": 8, "block_size": 4, "num_views": 2, "active": np.ones((1, 2))}, r"shape \(1, 2\), not \(2, 2\)"),
    ],
)
def test_sizes_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sample(**arguments)


@pytest.mark.parametrize(
    "documents",
    [
        [(2, 8)],  # starts inside a block
        [(0, 0)],  # empty
        [(8, 4)],
        [(0, 9), (8, 12)],  # overlap
        [(8, 12), (0, 4)],  # not in order
        [(0, 17)],  # beyond the sample
        [],
    ],
)
def test_impossible_documents_are_refused(documents: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="must be in order, not empty, and start at multiples of the block size 4"):
        Sample(16, 4, documents=np.array(documents, dtype=np.int64))
