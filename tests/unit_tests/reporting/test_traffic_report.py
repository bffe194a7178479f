# SPDX-License-Identifier: Apache-2.0
"""What `--csbp-ledger` writes, and when it says that measured and expected bytes agree."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_csbp.reporting.instruments import closing
from megatron_csbp.reporting.traffic_report import TrafficReport, closed_form, ledger_path
from megatron_csbp.transformer.geometry.layer_plans import layer_plans
from megatron_csbp.transformer.geometry.plan import AttentionPlan
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import CopyKind, Scheme, Sharding
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask
from megatron_csbp.transformer.traffic_ledger import Collective, Direction, Entry, Volume

CP, BP, CSBP = Scheme.CONTEXT_PARALLEL, Scheme.BLOCK_PARALLEL, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL
LAYERS = (3, 4)
# (P-1)/P x L x 2 x K x D x itemsize x B with P 4, L 64, K 6/3 on two tensor ranks, D 8, bf16, B 2.
UNIT = 3 * 64 // 4 * 2 * 3 * 8 * 2 * 2


def arguments(iteration: int = 0) -> Namespace:
    return Namespace(
        num_query_groups=6,
        group_query_attention=True,
        num_attention_heads=12,
        tensor_model_parallel_size=2,
        kv_channels=8,
        params_dtype=torch.bfloat16,
        micro_batch_size=2,
        eval_micro_batch_size=None,
        iteration=0,
        curr_iteration=iteration,
        csbp_head_groups=1,
        csbp_grad_reduce_dtype=None,
    )


def plan_of(scheme: Scheme = CSBP, window: int | None = None) -> AttentionPlan:
    return layer_plans(Sample(64, 4), Sharding(4, scheme), 1).plan(Mask(CleanAttention.TOKEN_CAUSAL, window))


@pytest.mark.parametrize("scheme, copies", [(CSBP, ["clean"]), (CP, ["clean", "corrupted"]), (BP, [])])
def test_a_training_layer_exchanges_three_times_and_an_evaluating_one_once(scheme: Scheme, copies: list[str]) -> None:
    forward = (Collective.GATHER, Direction.FORWARD)
    backward = ((Collective.GATHER, Direction.BACKWARD), (Collective.REDUCE_SCATTER, Direction.BACKWARD))
    for training, exchanges in ((True, (forward, *backward)), (False, (forward,))):
        assert closed_form(arguments(), plan_of(scheme), 7, training=training) == {
            Entry(7, CopyKind(kind), *exchange): Volume(1, UNIT * 4 // 3, UNIT)
            for kind in copies
            for exchange in exchanges
        }


def test_a_layer_with_a_window_exchanges_its_halo_and_nothing_that_it_holds() -> None:
    """Rank 1 of 4 has the chunks 1 and 6 of 8 positions: it needs 5 before each, and sends 5 to ranks 2 and 0."""
    halo = 10 * 2 * 3 * 8 * 2 * 2
    volumes = closed_form(arguments(), plan_of(window=6), 7, training=True)
    assert set(volumes.values()) == {Volume(1, halo, halo)}
    assert len(volumes) == 3


def test_evaluation_may_have_a_micro_batch_size_of_its_own() -> None:
    args = arguments()
    args.eval_micro_batch_size = 6
    (volume,) = closed_form(args, plan_of(), 1, training=False).values()
    assert volume.remote_bytes == 3 * UNIT
    assert {volume.remote_bytes for volume in closed_form(args, plan_of(), 1, training=True).values()} == {UNIT}


def test_heads_are_all_heads_without_groups_and_one_where_ranks_outnumber_them() -> None:
    args = arguments()
    args.group_query_attention = False
    (volume, *_) = closed_form(args, plan_of(), 1, training=True).values()
    assert volume.remote_bytes == 2 * UNIT
    args.group_query_attention, args.num_query_groups = True, 1
    (volume, *_) = closed_form(args, plan_of(), 1, training=True).values()
    assert 3 * volume.remote_bytes == UNIT


@pytest.mark.parametrize("dtype, factor", [("bf16", 1), ("fp32", 2)])
def test_gradients_count_in_the_dtype_in_which_they_travel(dtype: str, factor: int) -> None:
    args = arguments()
    args.csbp_grad_reduce_dtype = dtype
    for transfer, volume in closed_form(args, plan_of(), 1, training=True).items():
        assert volume.remote_bytes == UNIT * (factor if transfer.collective is Collective.REDUCE_SCATTER else 1)


def test_head_groups_split_exchanges_and_no_byte_changes() -> None:
    args = arguments()
    args.csbp_head_groups = 3
    assert set(closed_form(args, plan_of(), 1, training=True).values()) == {Volume(3, UNIT * 4 // 3, UNIT)}


def run(report: TrafficReport, iteration: int, *, training: bool = True, scale: int = 1) -> None:
    """Do as a run does: two micro-batches of two layers, which move `scale` times what they should."""
    for _ in range(2):
        layers = [(layer, plan_of()) for layer in LAYERS]
        report.expect_micro_batch(layers, arguments(iteration), training=training)
        for layer, plan in layers:
            for transfer, volume in closed_form(arguments(), plan, layer, training=training).items():
                report.ledger.add(transfer, volume.times(scale))
    if training:
        report.end_iteration(iteration + 1)


def lines_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"ledger.rank{rank}.jsonl").read_text().splitlines()]


def test_every_iteration_has_a_line_and_evaluation_one_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = TrafficReport(str(tmp_path / "ledger.jsonl"), rank=0)
    run(report, 0)
    run(report, 1)
    run(report, 1, training=False)
    run(report, 2)
    run(report, 2, training=False)
    report.close()
    lines = lines_of(tmp_path, 0)
    assert [(line["iteration"], line["phase"], line["remote_bytes"]) for line in lines] == [
        (1, "train", 12 * UNIT),
        (2, "train", 12 * UNIT),
        (2, "evaluate", 4 * UNIT),
        (3, "train", 12 * UNIT),
        (3, "evaluate", 4 * UNIT),
    ]
    assert all(line["payload_bytes"] * 3 == line["remote_bytes"] * 4 for line in lines)
    assert all(line["forward_steps"] == 2 and line["rank"] == 0 for line in lines)
    assert lines[0]["transfers"][1] == {
        "layer": 3,
        "tensors": "clean K/V",
        "collective": "gather",
        "direction": "backward",
        "exchanges": 2,
        "payload_bytes": 2 * UNIT * 4 // 3,
        "remote_bytes": 2 * UNIT,
    }
    assert [transfer["tensors"] for transfer in lines[0]["transfers"]] == ["clean K/V", "clean K/V", "clean dK/dV"] * 2
    table = capsys.readouterr().out
    assert "measured and closed form agree exactly" in table
    assert ["clean", "K/V", "forward", "20", f"{20 * UNIT:,}", f"{20 * UNIT:,}"] in map(str.split, table.splitlines())
    assert ["clean", "dK/dV", "backward", "12"] in (line.split()[:4] for line in table.splitlines())


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    for iteration in range(2):
        report = TrafficReport(str(tmp_path / "ledger.jsonl"), rank=3)
        run(report, iteration)
        report.close()
    assert [line["iteration"] for line in lines_of(tmp_path, 3)] == [1, 2]


def test_only_rank_0_prints_a_table_if_all_is_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = TrafficReport(str(tmp_path / "ledger.jsonl"), rank=1)
    run(report, 0)
    report.close()
    assert capsys.readouterr().out == ""


def test_any_rank_says_that_bytes_or_layers_disagree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = TrafficReport(str(tmp_path / "ledger.jsonl"), rank=1)
    run(report, 0, scale=2)
    report.close()
    assert "measured and closed form DISAGREE" in capsys.readouterr().out
    report = TrafficReport(str(tmp_path / "ledger.jsonl"), rank=1)
    run(report, 0)
    report.expect_micro_batch([(LAYERS[0], plan_of())], arguments(), training=True)
    for transfer, volume in closed_form(arguments(), plan_of(), LAYERS[1], training=True).items():
        report.ledger.add(transfer, volume)  # as many bytes, but of another layer
    report.close()
    assert "measured and closed form DISAGREE" in capsys.readouterr().out


def test_heads_may_be_sent_in_groups(tmp_path: Path) -> None:
    report = TrafficReport(str(tmp_path / "ledger.jsonl"), rank=1)
    report.expect_micro_batch([(3, plan_of())], arguments(), training=True)
    for transfer, whole in closed_form(arguments(), plan_of(), 3, training=True).items():
        for _ in range(3):
            report.ledger.add(transfer, Volume(1, whole.payload_bytes // 3, whole.remote_bytes // 3))
    report.end_iteration(1)
    assert report.agrees
    assert [transfer["exchanges"] for transfer in lines_of(tmp_path, 1)[0]["transfers"]] == [3, 3, 3]


def test_a_run_that_failed_gets_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Instruments:
        closed = 0

        def close(self) -> None:
            self.closed += 1

    instruments = Instruments()
    for leaving, closed in ((None, 1), (SystemExit(0), 2), (SystemExit(1), 2), (RuntimeError(), 2)):
        try:
            with closing(instruments):  # type: ignore[arg-type]
                if leaving is not None:
                    raise leaving
        except BaseException as error:
            assert error is leaving  # noqa: PT017
        assert instruments.closed == closed
    with closing(None):
        pass


def test_each_rank_has_a_file_of_its_own() -> None:
    assert ledger_path("runs/ledger.jsonl", 12) == Path("runs/ledger.rank12.jsonl")
    assert ledger_path("ledger", 0) == Path("ledger.rank0")
