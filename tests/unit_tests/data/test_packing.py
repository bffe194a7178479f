# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_csbp.data.packing import WINDOW, fill_of, join, pack_epoch


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 256), min_size=1, max_size=300),
    block=st.sampled_from([1, 8, 32]),
    seed=st.integers(0, 5),
)
def test_every_document_is_packed_once_and_no_sample_overflows(lengths: list[int], block: int, seed: int) -> None:
    packing = pack_epoch(np.array(lengths), 256, block, np.random.default_rng(seed))
    assert sorted(packing.documents.tolist()) == list(range(len(lengths)))
    blocks = -(-np.array(lengths) // block)
    for index in range(len(packing)):
        assert 0 < blocks[packing.of_sample(index)].sum() * block <= 256


def test_packing_depends_on_the_generator_alone() -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 1000)
    packings = [pack_epoch(lengths, 1024, 32, np.random.default_rng(seed)) for seed in (3, 3, 4)]
    assert np.array_equal(packings[0].documents, packings[1].documents)
    assert not np.array_equal(packings[0].documents, packings[2].documents)


def chat_lengths(number: int) -> np.ndarray:
    """Tokens of chats: a few turns, questions of about 40 tokens and answers of about 220, some far longer."""
    generator = np.random.default_rng(0)
    turns = generator.geometric(0.45, number)
    chats = [generator.lognormal(np.log([40, 220]), [1.0, 0.9], (count, 2)).sum() + 10 * count for count in turns]
    return np.minimum(np.array(chats).astype(np.int64), 4096)


def test_chats_fill_97_percent_of_the_samples() -> None:
    lengths = chat_lengths(2 * WINDOW)
    assert 500 < np.median(lengths) < 800
    packing = pack_epoch(lengths, 4096, 32, np.random.default_rng(0))
    fill = fill_of(packing, lengths, 4096, 32)
    assert fill.samples == len(packing)
    assert fill.blocks >= fill.tokens >= 0.97
    assert fill.blocks >= 0.99


def test_documents_come_at_about_the_time_that_the_shuffle_says() -> None:
    lengths = np.full(4 * WINDOW, 100)
    packing = pack_epoch(lengths, 1000, 10, np.random.default_rng(0))
    order = np.random.default_rng(0).permutation(len(lengths))
    place = np.empty(len(lengths), dtype=int)
    place[packing.documents] = np.arange(len(lengths))
    assert np.abs(place[order] - np.arange(len(lengths))).max() < 2 * WINDOW


def test_joined_packings_are_one_after_the_other() -> None:
    first, second = (pack_epoch(np.array([3, 4]), 4, 1, np.random.default_rng(0)) for _ in range(2))
    joined = join([first, second])
    assert len(joined) == len(first) + len(second) == 4
    assert [joined.of_sample(index).tolist() for index in range(4)] == [
        *(first.of_sample(index).tolist() for index in range(2)),
        *(second.of_sample(index).tolist() for index in range(2)),
    ]


def test_a_document_longer_than_a_sample_is_the_callers_mistake() -> None:
    with pytest.raises(AssertionError, match="cut or refused"):
        pack_epoch(np.array([5]), 4, 1, np.random.default_rng(0))
