# SPDX-License-Identifier: Apache-2.0
"""RESULTS.md says what the results say, whatever that is."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parts import PARTS
from benchmarks.readme import BEGIN, END, README, update_readme
from benchmarks.report import write_report
from benchmarks.run import HERE

ABOUT = {"date": "2026-01-01 00:00 UTC", "command": "python -m benchmarks.run", "load_average": 0.1, "seconds": 1.0}
MACHINE = {"cores": 2, "processor": "P", "memory_gib": 1.0, "kernel": "6"}


def throughput_row(variant: str, length: int, step: float) -> dict[str, Any]:
    return {
        "sweep": "NVLink",
        "oversubscribed": False,
        "ranks": 2,
        "variant": variant,
        "sequence_length": length,
        "step_seconds": step,
        "step_seconds_all": [step],
        "tokens_per_second": length / step,
        "compute_seconds": step,
        "exposed_seconds": 0.0,
        "hidden_seconds": 0.0,
        "network_alone_seconds": 0.0,
    }


def throughput(csbp_steps: list[float]) -> dict[str, Any]:
    rows = []
    for length, step in zip((1024, 2048), csbp_steps, strict=True):
        rows += [
            throughput_row("CP", length, 1.0),
            throughput_row("BP", length, 2.0),
            throughput_row("CSBP", length, step),
        ]
    shape = {"num_layers": 2, "hidden": 8, "num_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "ffn": 8}
    return {
        "rows": rows,
        "links": [
            {
                "sweep": "NVLink",
                "link": "NVLink",
                "ranks": 2,
                "core_flops": 1e9,
                "bytes_per_second": 1e6,
                "cluster_bytes_per_second": 1e9,
            }
        ],
        "shape": shape | {"block_size": 2, "clean_attention": "block-causal"},
        "h200_attention_flops": 6e14,
        "h200_itemsize": 2,
        "head_groups": 2,
    }


def report(parts: dict[str, Any], folder: Path) -> str:
    write_report({"parts": parts, "machine": {}, "versions": {}}, folder)
    return (folder / "RESULTS.md").read_text()


def test_a_part_that_was_not_measured_says_why(tmp_path: Path) -> None:
    text = report({"wire": ABOUT | {"not_measured": "network namespaces need root"}}, tmp_path)
    assert "**Not measured**: network namespaces need root." in text


def test_a_part_that_failed_shows_how(tmp_path: Path) -> None:
    assert "ZeroDivisionError: by zero" in report({"work": ABOUT | {"failed": "ZeroDivisionError: by zero"}}, tmp_path)


def test_every_part_has_its_section(tmp_path: Path) -> None:
    text = report({}, tmp_path)
    assert [part.title for part in PARTS.values() if f"## {part.title}\n" not in text] == []


@pytest.mark.parametrize(
    "csbp_steps, sentence",
    [
        ([0.5, 0.8], "CSBP runs at 1.25 to 2.00 times the speed of CP; with L the ratio falls."),
        ([0.8, 0.5], "CSBP runs at 1.25 to 2.00 times the speed of CP; with L the ratio grows."),
        ([0.8, 1.25], "**CSBP is slower than CP at L = 2K.**"),
    ],
)
def test_the_reading_follows_the_numbers(csbp_steps: list[float], sentence: str, tmp_path: Path) -> None:
    text = report({"throughput": ABOUT | {"result": throughput(csbp_steps)}}, tmp_path)
    assert sentence in text
    assert "![Tokens per second and speed relative to CP against L](plots/throughput.png)" in text
    assert (tmp_path / "plots" / "throughput.png").stat().st_size > 0


def test_an_old_plot_does_not_stand_beside_a_new_report_without_its_figures(tmp_path: Path) -> None:
    report({"throughput": ABOUT | {"result": throughput([0.5, 0.5])}}, tmp_path)
    report({"throughput": ABOUT | {"not_measured": "no root"}}, tmp_path)
    assert not (tmp_path / "plots" / "throughput.png").exists()


def test_what_is_committed_is_what_the_results_say(tmp_path: Path) -> None:
    results = json.loads((HERE / "results.json").read_text())
    write_report(results, tmp_path)
    assert (tmp_path / "RESULTS.md").read_text() == (HERE / "RESULTS.md").read_text(), (
        "python -m benchmarks.run --report"
    )
    readme = tmp_path / "README.md"
    readme.write_text(README.read_text())
    update_readme(results, readme)
    assert readme.read_text() == README.read_text(), "python -m benchmarks.run --report"
    assert {plot.name for plot in (tmp_path / "plots").iterdir()} == {plot.name for plot in (HERE / "plots").iterdir()}


def test_the_readme_gets_the_figures_that_there_are_and_keeps_the_rest(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    results = {"parts": {"throughput": ABOUT | {"result": throughput([0.5, 0.8])}}, "machine": MACHINE}
    for _ in range(2):
        update_readme(results, readme)
    text = readme.read_text()
    assert text.startswith(f"before\n{BEGIN}\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "links as of NVLink, 2 ranks, L = 1024 to 2048 | 1024 to 2048 | 2048 to 2560 | 1.25 to 2.00 |" in text
    assert "old" not in text
    assert "wire" not in text
