# SPDX-License-Identifier: Apache-2.0
"""How slow a link must be."""

import pytest

from benchmarks.links import ACROSS_NODES, H200_ATTENTION_FLOPS, H200_NETWORK_BYTES, NVLINK, UNLIMITED


def test_a_core_as_fast_as_an_h200_with_elements_as_large_gets_the_h200s_link() -> None:
    assert ACROSS_NODES.scaled_bytes(H200_ATTENTION_FLOPS, itemsize=2) == pytest.approx(H200_NETWORK_BYTES)


def test_a_slower_core_gets_a_link_that_moves_fewer_elements_by_the_same_factor() -> None:
    slow = ACROSS_NODES.scaled_bytes(H200_ATTENTION_FLOPS / 1000, itemsize=4)
    assert slow == pytest.approx(2 * H200_NETWORK_BYTES / 1000)


def test_nvlink_is_faster_than_the_network_by_the_same_factor_here_and_there() -> None:
    fast, slow = (link.scaled_bytes(8e10, 4) for link in (NVLINK, ACROSS_NODES))
    assert fast is not None
    assert slow is not None
    assert fast / slow == pytest.approx(450 / 50)


def test_an_unlimited_link_has_no_rate() -> None:
    assert UNLIMITED.scaled_bytes(8e10, 4) is None
