# SPDX-License-Identifier: Apache-2.0
"""The report of the planner: published figures, what real collectives carry, and the time that planning takes."""

import json
from pathlib import Path

import pytest

from megatron_csbp.tools.attention_step import exchanged_by_layer
from megatron_csbp.tools.plan_report import (
    EXCHANGES,
    MODELS,
    exchanged_bytes,
    last_rank_plan,
    main,
    plan_row,
    plan_rows,
)
from megatron_csbp.transformer.geometry.scheme import Scheme
from megatron_csbp.transformer.geometry.visibility import CleanAttention

ROOT = Path(__file__).parents[3]
TOKEN_CAUSAL = CleanAttention.TOKEN_CAUSAL
CP, BP, CSBP = Scheme.CONTEXT_PARALLEL, Scheme.BLOCK_PARALLEL, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL


def test_nemotron_14b_at_256k_on_eight_ranks_moves_105_and_210_gib() -> None:
    moved = {
        scheme: plan_row("nemotron-14b", scheme, 262144, 8, 32, TOKEN_CAUSAL).remote_bytes / 2**30
        for scheme in (CSBP, CP, BP)
    }
    assert moved == {CSBP: 105.0, CP: 210.0, BP: 0.0}


def test_planning_a_million_tokens_on_64_ranks_takes_under_a_second() -> None:
    row = plan_row("nemotron-14b", CSBP, 2**20, 64, 32, TOKEN_CAUSAL)
    assert row.plan_seconds < 1.0
    assert row.rows == 2 * 2**20 // 64
    assert row.imbalance == row.executed_ratio == 1.0


@pytest.mark.parametrize("clean_attention", CleanAttention)
@pytest.mark.parametrize("scheme", [CP, BP, CSBP])
@pytest.mark.parametrize("model, length, group_size", [("nemotron-3b", 65536, 4), ("nemotron-14b", 2**20, 64)])
def test_the_exchange_starts_just_the_collectives_that_the_plan_says(
    model: str, length: int, group_size: int, scheme: Scheme, clean_attention: CleanAttention
) -> None:
    plan = last_rank_plan(scheme, length, group_size, 32, clean_attention)
    expected = EXCHANGES * exchanged_bytes(plan, MODELS[model])
    assert exchanged_by_layer(plan, MODELS[model]) == expected
    assert bool(expected) == (scheme is not BP)


def test_every_model_length_and_group_size_is_planned_under_every_scheme() -> None:
    rows = plan_rows(["nemotron-3b", "nemotron-8b"], [65536], [2, 64], 32, TOKEN_CAUSAL)
    assert [(row.model, row.group_size, row.scheme) for row in rows] == [
        (model, size, scheme)
        for model in ("nemotron-3b", "nemotron-8b")
        for size in (2, 64)
        for scheme in (CP, BP, CSBP)
    ]
    # Sharding the clean copy costs no operation, and halves the linear layers of two ranks at least.
    by_scheme = {row.scheme: row for row in rows if (row.model, row.group_size) == ("nemotron-8b", 64)}
    assert by_scheme[CP].attention_flops == by_scheme[CSBP].attention_flops < by_scheme[BP].attention_flops
    assert by_scheme[BP].linear_flops == 32.5 * by_scheme[CSBP].linear_flops


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    main(f"--model nemotron-14b --seq-length 262144 --bp-size 8 --dry-run --json {file}".split())
    output = capsys.readouterr().out
    assert output.splitlines()[3].split()[3:6] == ["CSBP", "65536", "105.00"]
    assert "all 3 rows carry exactly the planned bytes" in output
    rows = json.loads(file.read_text())
    assert [(row["scheme"], row["remote_bytes"] / 2**30) for row in rows] == [("CP", 210), ("BP", 0), ("CSBP", 105)]


def test_with_tiles_it_prints_the_tables_of_the_documentation_and_one_for_every_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["--tiles", "--model", "nemotron-14b", "nemotron-8b", "--bp-size", "8", "--seq-length", "32768", "65536"])
    lines = capsys.readouterr().out.splitlines()
    titles = [line for line in lines if not line.startswith("|")]
    assert titles == [
        f"{model}, L = {length}, P = 8, one layer of the last rank; modelled, not measured"
        for model in ("nemotron-14b", "nemotron-8b")
        for length in (32768, 65536)
    ]
    last = "\n".join(lines[lines.index(titles[-1]) + 1 :])
    assert last in (ROOT / "docs" / "gpu.md").read_text()


@pytest.mark.parametrize(
    "command_line, message",
    [
        ("--tiles --seq-length 1000 --bp-size 8", "--seq-length 1000 must be a multiple of"),
        ("--tiles --bp-size 1", "--bp-size 1 must be at least 2"),
        ("--tiles --bp-size 8 --dry-run", "--tiles prints another table, without --json and --dry-run"),
        ("--tiles --bp-size 8 --json rows.json", "--tiles prints another table, without --json and --dry-run"),
        ("--seq-length 1000 --bp-size 8", "--seq-length 1000 must be a multiple of"),
        ("--bp-size 1", "--bp-size 1 must be at least 2"),
        ("--json nowhere/rows.json", "--json nowhere/rows.json is a folder, or in one that does not exist"),
    ],
)
def test_the_command_refuses_what_cannot_be_planned(
    command_line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(command_line.split())
    assert message in capsys.readouterr().err
