# SPDX-License-Identifier: Apache-2.0
"""A reduced run of every part of the benchmark suite, by its own command."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.network import PREFIX, why_unavailable
from benchmarks.parts import PARTS
from tests.support.megatron_run import ROOT, environment

# Parts that train for minutes. The conversion is the demo, which has tests of its own.
LONG = ["throughput", "answers", "training"]
SHORT = [name for name in PARTS if name not in (*LONG, "conversion")]
REASON = why_unavailable()
needs_namespaces = pytest.mark.skipif(REASON is not None, reason=f"slow links and wire counters not checked: {REASON}")


def run(names: list[str], folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.run", "--quick", "--out", str(folder), "--only", *names]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    parts: dict[str, Any] = json.loads((folder / "results.json").read_text())["parts"]
    return parts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("benchmarks")


@pytest.fixture(scope="module")
def parts(folder: Path) -> dict[str, Any]:
    return run(SHORT, folder)


@pytest.fixture(scope="module")
def long_parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(LONG, tmp_path_factory.mktemp("long"))


@pytest.mark.parametrize("which", ["parts", pytest.param("long_parts", marks=pytest.mark.slow)])
def test_every_part_is_measured_or_says_why_not(which: str, request: pytest.FixtureRequest) -> None:
    parts = request.getfixturevalue(which)
    missing = {name for name, part in parts.items() if "result" not in part}
    assert missing == (set() if REASON is None else {name for name in parts if PARTS[name].needs_network})
    assert all(parts[name]["not_measured"] == REASON for name in missing)


@pytest.mark.slow
def test_every_case_of_answers_and_views_is_timed(long_parts: dict[str, Any]) -> None:
    seconds = long_parts["answers"]["result"]["seconds"]
    assert set(seconds) == {"answers", "all blocks", "two views, one clean copy", "two doubled sequences"}
    assert all(value > 0 for value in seconds.values())


@pytest.mark.root
@needs_namespaces
def test_wire_ledger_and_formula_agree_and_csbp_moves_half(parts: dict[str, Any]) -> None:
    rows = {row["what"]: row for row in parts["wire"]["result"]["rows"]}
    for name in ("CP forward", "CP backward", "CSBP forward", "CSBP backward"):
        assert rows[name]["worst_wire_error"] < 0.01
        assert rows[name]["ledger_bytes"] == rows[name]["formula_bytes"] > 0
    assert rows["CSBP forward"]["formula_bytes"] * 2 == rows["CP forward"]["formula_bytes"]
    assert rows["CSBP backward"]["wire_received_bytes"] / rows["CP backward"]["wire_received_bytes"] == pytest.approx(
        0.5, rel=0.01
    )
    assert rows["BP forward"]["wire_received_bytes"] < 0.01 * rows["CSBP forward"]["wire_received_bytes"]


@pytest.mark.slow
@pytest.mark.root
@needs_namespaces
def test_exchanges_take_at_least_the_time_that_the_slow_link_needs(long_parts: dict[str, Any]) -> None:
    result = long_parts["throughput"]["result"]
    rate = next(link["bytes_per_second"] for link in result["links"] if link["link"] == "across nodes")
    shape = result["shape"]
    for row in result["rows"]:
        if row["sweep"] == "Across nodes" and row["variant"] == "CP":
            unit = row["sequence_length"] * shape["num_key_value_heads"] * shape["head_dim"] * 4
            ideal = 3 * 2 * shape["num_layers"] * unit / rate
            assert row["network_alone_seconds"] > 0.5 * ideal  # the first burst is free
            assert row["step_seconds"] >= row["exposed_seconds"]


def test_memory_and_work_of_csbp_are_never_above_cps(parts: dict[str, Any]) -> None:
    for name, fields in (("memory", ("saved_bytes", "peak_bytes")), ("work", ("executed_to_allowed",))):
        rows = parts[name]["result"]["rows"]
        cp, csbp = ([row for row in rows if row["variant"] == variant] for variant in ("CP", "CSBP"))
        assert len(cp) == len(csbp) > 0
        assert all(ours[field] <= theirs[field] for ours, theirs in zip(csbp, cp, strict=True) for field in fields)


def test_no_pair_is_wasted(parts: dict[str, Any]) -> None:
    ratios = [row["executed_to_allowed"] for row in parts["work"]["result"]["rows"] if row["variant"] == "CSBP"]
    assert ratios
    assert max(ratios) <= 1.02


def test_the_plan_gives_the_published_bytes_of_the_14b_model(parts: dict[str, Any]) -> None:
    rows = {
        row["scheme"]: row["remote_bytes"] / 2**30
        for row in parts["scale"]["result"]["rows"]
        if (row["model"], row["sequence_length"], row["group_size"]) == ("nemotron-14b", 2**18, 8)
    }
    assert rows == {"CP": 210.0, "BP": 0.0, "CSBP": 105.0}


def test_the_attention_path_is_counted(parts: dict[str, Any]) -> None:
    (row,) = parts["attention"]["result"]["rows"]
    assert row["kernel_calls"] == 2 * row["tiles"]
    assert 0 < row["dispatch_share"] < 1


@pytest.mark.slow
@pytest.mark.root
@needs_namespaces
def test_both_trainings_go_through_the_same_losses(long_parts: dict[str, Any]) -> None:
    result = long_parts["training"]["result"]
    assert [run["scheme"] for run in result["runs"]] == ["CP", "CSBP"]
    assert all(len(run["iterations"]) == len(run["validations"]) == 2 for run in result["runs"])
    assert result["largest_difference"] < 1e-5


def test_the_report_is_written_from_the_results(folder: Path, parts: dict[str, Any]) -> None:
    text = (folder / "RESULTS.md").read_text()
    assert "A reduced run" in text
    (row,) = parts["attention"]["result"]["rows"]
    assert f"{row['to_flash']:.2f} times as long as plain flash attention" in text


@pytest.mark.root
@needs_namespaces
def test_no_namespace_is_left(folder: Path) -> None:
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    alive = {path.name for path in Path("/proc").iterdir() if path.name.isdigit()}
    left = [line.split()[0] for line in listed.splitlines() if line.startswith(PREFIX)]
    assert [name for name in left if name.removeprefix(f"{PREFIX}-").split("-")[0] not in alive] == []
