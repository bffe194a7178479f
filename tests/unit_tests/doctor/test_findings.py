# SPDX-License-Identifier: Apache-2.0
"""Findings of several ranks are said once, and with their ranks where they differ."""

from megatron_csbp.doctor.findings import Finding, fail, failed, merged, ok, warn

HOSTS = ["a", "a", "b", "b"]


def test_what_all_machines_found_is_said_once() -> None:
    findings = merged([[ok("x", "fine")], [], [ok("x", "fine")], []], HOSTS)
    assert [finding.lines for finding in findings] == [["[ok] x: fine"]]


def test_what_one_machine_found_has_its_rank_and_keeps_its_place() -> None:
    of_ranks = [[ok("x", "fine"), ok("y", "1")], [], [fail("x", "broken", "mend it"), ok("y", "1")], []]
    lines = [line for finding in merged(of_ranks, HOSTS) for line in finding.lines]
    assert lines == ["[ok] x [rank 0 (a)]: fine", "[fail] x [rank 2 (b)]: broken", "  fix: mend it", "[ok] y: 1"]


def test_only_failures_fail() -> None:
    assert not failed([ok("x", "fine"), warn("y", "slow", "hurry")])
    assert failed([ok("x", "fine"), fail("y", "broken", "mend it")])


def test_findings_survive_json() -> None:
    finding = fail("y", "broken", "mend it")
    assert Finding.from_json(finding.as_json()) == finding
