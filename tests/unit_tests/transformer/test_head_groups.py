# SPDX-License-Identifier: Apache-2.0
"""Cutting heads into groups, and the number of groups that sizes ask for."""

import pytest

from megatron_csbp.transformer.head_groups import default_head_groups, head_groups

MIB = 2**20


@pytest.mark.parametrize("num_query_heads, num_key_value_heads", [(8, 8), (8, 4), (12, 4), (32, 8), (4, 1)])
def test_every_head_is_in_one_group_with_the_heads_it_attends_to(
    num_query_heads: int, num_key_value_heads: int
) -> None:
    shared = num_query_heads // num_key_value_heads
    for count in (count for count in range(1, num_key_value_heads + 1) if num_key_value_heads % count == 0):
        groups = head_groups(num_query_heads, num_key_value_heads, count)
        assert len(groups) == count
        queries, keys = list(range(num_query_heads)), list(range(num_key_value_heads))
        assert [head for group in groups for head in queries[group.queries]] == queries
        assert [head for group in groups for head in keys[group.keys]] == keys
        for group in groups:
            assert {head // shared for head in queries[group.queries]} == set(keys[group.keys])


@pytest.mark.parametrize(
    "num_key_value_heads, clean_mib, recomputes, expected",
    [
        (8, 1024, False, 4),
        (8, 1024, True, 2),  # what recomputation keeps for backward stays two groups
        (8, 127, False, 3 - 1),  # 3 does not divide 8
        (8, 63, False, 1),
        (6, 1024, False, 3),
        (7, 1024, False, 1),
        (1, 2**20, False, 1),
        (8, 0, False, 1),
    ],
)
def test_the_default_leaves_each_group_enough_to_hide(
    num_key_value_heads: int, clean_mib: int, recomputes: bool, expected: int
) -> None:
    assert default_head_groups(num_key_value_heads, clean_mib * MIB, recomputes=recomputes) == expected
