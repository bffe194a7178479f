# SPDX-License-Identifier: Apache-2.0
"""Two ranks that stand for two machines, and one of them is wrong: in a version, its clock, its file system."""

import functools
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_csbp.doctor import gather_speed, group
from megatron_csbp.doctor.findings import Finding
from megatron_csbp.doctor.launcher import Place
from tests.support.gloo_ranks import Facts, facts_of_ranks

HOSTS = ["node0", "node1"]
SKEW_S = 5.0


def collect(folder: str) -> Facts:
    here = Place(dist.get_rank(), dist.get_rank(), 2)
    is_wrong = here.rank == 1
    group._SEES_S = 1.0
    found: dict[str, list[Finding]] = {}
    found["same versions"] = group.check_versions(HOSTS)
    found["shared"] = group.check_shared(Path(folder), HOSTS, here)
    found["same clock"] = group.check_clocks(HOSTS, here)
    found["gather"] = gather_speed.check_gather(here, 1, 2, 1 << 20)
    other = tempfile.mkdtemp()
    found["not shared"] = group.check_shared(Path(other), HOSTS, here)
    found["read-only"] = group.check_shared(Path("/proc/sys" if is_wrong else folder), HOSTS, here)
    if is_wrong:
        installed, now = group.installed_versions, time.time
        group.installed_versions = lambda: installed() | {"PyTorch": "2.9.0"}
        time.time = lambda: now() + SKEW_S
    found["other version"] = group.check_versions(HOSTS)
    found["other clock"] = group.check_clocks(HOSTS, here)
    return {name: [line for finding in findings for line in finding.lines] for name, findings in found.items()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("shared")
    of_ranks = facts_of_ranks(functools.partial(collect, str(folder)), 2, tmp_path_factory.mktemp("ranks"))
    assert not any(of_ranks[1].values()), "rank 0 speaks for all"
    assert list(folder.iterdir()) == []
    return of_ranks[0]


def test_sound_machines_are_found_sound(found: dict[str, Any]) -> None:
    assert found["same versions"] == ["[ok] versions agree: 2 ranks on 2 machine(s) have the same"]
    assert found["same clock"][0].startswith("[ok] clocks: node1 is ")
    assert "seen by 2 machine(s), both ways, within" in found["shared"][0]
    assert found["gather"][0].startswith(
        "[ok] all-gather of the context groups: 1.00 MiB from 1 other rank(s) by gloo in "
    )


def test_a_version_that_one_machine_has_is_named(found: dict[str, Any]) -> None:
    line, fix = found["other version"]
    assert line.startswith("[fail] versions agree: the version of PyTorch is ")
    assert "and 2.9.0 on rank 1 (node1)" in line
    assert "the same container image" in fix


def test_a_clock_that_goes_wrong_is_measured(found: dict[str, Any]) -> None:
    line, fix = found["other clock"]
    assert line.startswith("[warn] clocks: node1 is +")
    skew = float(line.partition("is +")[2].partition(" s")[0])
    assert abs(skew - SKEW_S) < 1.0
    assert "chrony" in fix


def test_a_folder_that_is_not_shared_is_named(found: dict[str, Any]) -> None:
    line, fix = found["not shared"]
    assert "files are not seen within 1 s between node0 and node1" in line
    assert "all nodes mount" in fix


def test_a_folder_that_one_machine_cannot_write_into_is_named(found: dict[str, Any]) -> None:
    line, fix = found["read-only"]
    assert "cannot be written into on node1: " in line
    assert "read-write" in fix
