# SPDX-License-Identifier: Apache-2.0
"""Differences name the field, the values and the ranks."""

import pytest

from megatron_csbp.agreement.differences import differences, digest, disagreement, ranks_in_words


def test_equal_facts_have_equal_digests_in_any_order() -> None:
    assert digest({"a": "1", "b": "2"}) == digest({"b": "2", "a": "1"})
    assert digest({"a": "1", "b": "2"}) != digest({"a": "12", "b": ""})
    assert differences([{"a": "1"}] * 3, ["x"] * 3) == []


def test_the_value_of_most_ranks_comes_first() -> None:
    facts = [{"--lr": "2"}, *[{"--lr": "1"}] * 6, {"--lr": "3"}]
    hosts = ["node0"] * 4 + ["node1"] * 4
    expected = "--lr is 1 on ranks 1-6 (node0, node1) and 2 on rank 0 (node0) and 3 on rank 7 (node1)"
    assert differences(facts, hosts) == [expected]


def test_a_fact_that_a_rank_lacks_is_absent() -> None:
    assert differences([{"NVTE_X": "1"}, {}], ["a", "a"]) == ["NVTE_X is 1 on rank 0 and absent on rank 1"]


@pytest.mark.parametrize(
    "ranks, said",
    [
        ([3], "rank 3"),
        ([0, 1, 2, 5], "ranks 0-2, 5"),
        (list(range(0, 40, 2)), "ranks 0, 2, 4, 6, 8, 10, 12, 14, ..."),
    ],
)
def test_ranks_are_said_as_runs(ranks: list[int], said: str) -> None:
    assert ranks_in_words(ranks) == said


def test_many_fields_and_long_values_are_cut() -> None:
    facts = [{f"field {i}": "x" * 500 for i in range(12)}, {}]
    said = disagreement(facts, ["a", "a"])
    assert "; and 4 more field(s). Start all of them with the same command" in said
    assert len(said) < 3000
