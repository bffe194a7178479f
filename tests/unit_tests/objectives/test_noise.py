# SPDX-License-Identifier: Apache-2.0
import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_csbp.objectives.noise import SampleNoise

KEY = {"seed": 1234, "split": 0, "sample_index": 77, "epoch": 3}


def largest_gap(samples: np.ndarray) -> float:
    """Kolmogorov-Smirnov distance to the uniform distribution, in units in which 1.63 is the 1 percent point."""
    ordered = np.sort(samples)
    steps = np.arange(len(ordered) + 1) / len(ordered)
    distance = max(np.max(steps[1:] - ordered), np.max(ordered - steps[:-1]))
    return float(distance * np.sqrt(len(ordered)))


def digest(noise: SampleNoise) -> str:
    parts = [noise.block_levels(13), np.array([noise.sequence_level()]), noise.uniforms(0, 40)]
    return hashlib.sha256(b"".join(part.astype("<f8").tobytes() for part in parts)).hexdigest()


@given(first=st.integers(0, 300), length=st.integers(0, 50))
def test_any_range_of_tokens_equals_the_slice_of_the_whole(first: int, length: int) -> None:
    whole = SampleNoise(**KEY).uniforms(0, 350)
    np.testing.assert_array_equal(SampleNoise(**KEY).uniforms(first, length), whole[first : first + length])


def test_a_far_range_is_drawn_without_drawing_what_lies_before() -> None:
    far = SampleNoise(**KEY).uniforms(1 << 60, 5)
    np.testing.assert_array_equal(far[1:], SampleNoise(**KEY).uniforms((1 << 60) + 1, 4))


@pytest.mark.parametrize(
    "view, expected",
    [
        (0, "1c137be17360e44316be45711c8dab9266924a31899f6df24b4be95c1e214f12"),
        (1, "432a7a6c52d10919d20edfa1e265222c7073967f7122eda388910b5fec18330e"),
        (300, "572c969ff0020c364257acd98e78f933822fe37fd1fc03128d4872774d810a9a"),
    ],
)
def test_noise_of_each_view_is_what_it_was(view: int, expected: str) -> None:
    """View 0 has the numbers of the versions without views, whose word `view` was the epoch."""
    assert digest(SampleNoise(**KEY, view=view)) == expected


def test_no_two_views_or_purposes_share_a_stream() -> None:
    """A view is added beside the purpose, in bits that no purpose has."""
    streams = [
        array.tobytes()
        for view in range(40)
        for noise in [SampleNoise(**KEY, view=view)]
        for array in (noise.uniforms(0, 16), noise.block_levels(16), np.array([noise.sequence_level()]))
    ]
    assert len(set(streams)) == len(streams)


@pytest.mark.parametrize("part", [*KEY, "view"])
def test_each_part_of_the_key_changes_every_number(part: str) -> None:
    one, other = SampleNoise(**KEY), SampleNoise(**{**KEY, part: KEY.get(part, 0) + 1})
    assert not np.any(one.uniforms(0, 64) == other.uniforms(0, 64))
    assert not np.any(one.block_levels(64) == other.block_levels(64))
    assert one.sequence_level() != other.sequence_level()


def test_the_global_generators_are_neither_read_nor_moved() -> None:
    np.random.seed(1)
    before = digest(SampleNoise(**KEY)), np.random.get_state()[1].tolist()
    np.random.seed(1)
    assert (digest(SampleNoise(**KEY)), np.random.get_state()[1].tolist()) == before
    np.random.seed(2)
    assert digest(SampleNoise(**KEY)) == before[0]


@pytest.mark.parametrize("num_blocks", [1, 2, 7, 64])
def test_block_levels_hold_one_level_in_each_stratum(num_blocks: int) -> None:
    levels = SampleNoise(**KEY).block_levels(num_blocks)
    assert sorted((levels * num_blocks).astype(int)) == list(range(num_blocks))


def test_each_block_is_uniform_whatever_its_position() -> None:
    levels = np.stack([SampleNoise(1, 0, sample, 0).block_levels(8) for sample in range(3000)])
    assert max(largest_gap(levels[:, block]) for block in range(8)) < 1.9  # the largest of 8 at the 1 percent point
    assert np.abs(levels.mean(axis=0) - 0.5).max() < 4 * np.sqrt(1 / 12 / 3000)


def test_token_and_sequence_noise_is_uniform() -> None:
    assert largest_gap(SampleNoise(**KEY).uniforms(0, 20000)) < 1.63
    assert largest_gap(np.array([SampleNoise(5, 0, i, 0).sequence_level() for i in range(3000)])) < 1.63


def test_token_noise_does_not_follow_the_block_levels() -> None:
    pairs = [(n.block_levels(1)[0], n.sequence_level(), *n.uniforms(0, 2)) for n in map(sample_noise, range(4000))]
    correlations = np.corrcoef(np.array(pairs).T) - np.eye(4)
    assert np.abs(correlations).max() < 4 / np.sqrt(4000)


def sample_noise(index: int) -> SampleNoise:
    return SampleNoise(9, 1, index, 0)


@pytest.mark.parametrize("part", KEY)
@pytest.mark.parametrize("value", [-1, 1 << 64])
def test_a_key_that_does_not_fit_is_refused_by_name(part: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"noise {part} {value} must be at least 0 and below 2\*\*64"):
        SampleNoise(**{**KEY, part: value})


@pytest.mark.parametrize("view", [-1, 1 << 56])
def test_a_view_that_does_not_fit_beside_the_purpose_is_refused(view: int) -> None:
    with pytest.raises(ValueError, match=rf"noise view {view} must be at least 0 and below 2\*\*56"):
        SampleNoise(**KEY, view=view)
