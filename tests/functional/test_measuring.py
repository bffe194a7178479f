# SPDX-License-Identifier: Apache-2.0
"""What whole runs report of themselves: the byte ledger, exposed communication, and Megatron's FLOPs."""

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from megatron.core import dist_checkpointing
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.functional.model_flags import BLOCK_DIFFUSION, DEEP, HYBRID, iterations, words
from tests.support.megatron_run import Finished, Ranks

SEQUENCE_LENGTH = 64
ITERATIONS = 3
MODEL = [*DEEP, *BLOCK_DIFFUSION, *words("--clean-attention token-causal --log-throughput")]
UNIT = SEQUENCE_LENGTH // 2 * 2 * 2 * 16 * 4
"""Bytes that one exchange of one copy brings to a rank of two: half of the rows, K and V of 2 heads of 16, fp32."""
MICRO_BATCHES = 4
PROGRESS = rf"\[csbp\] iteration (\d)/{ITERATIONS} \| ETA \d+:\d\d:\d\d \| clean tokens per second: ([\d.]+)"
TOPOLOGIES = {
    "one rank": (1, ""),  # without --csbp-timing, which clean tokens per second do not need
    "tp2 x cp2": (4, "--csbp-timing --tensor-model-parallel-size 2 --context-parallel-size 2 --context-scheme cp"),
    "interleaved pp2 x csbp2 with recomputation in bf16": (
        4,
        "--csbp-timing --bf16 --context-parallel-size 2 --bp-size 2 --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage 1 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
    ),
}


@dataclass(frozen=True)
class Measured:
    """A run, the ledger of each of its ranks, the operations that Megatron counted, and TensorBoard's scalars."""

    run: Finished
    ledgers: list[list[dict[str, Any]]]
    operations: float
    scalars: dict[str, dict[int, float]]


@pytest.fixture(scope="module")
def measured(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Measured]:
    """Train each topology once."""
    known: dict[str, Measured] = {}

    def train(name: str) -> Measured:
        if name not in known:
            (world_size, flags), folder = TOPOLOGIES[name], tmp_path_factory.mktemp("measured")
            measuring = ["--csbp-ledger", str(folder / "ledger.jsonl"), "--save", str(folder)]
            measuring += ["--tensorboard-dir", str(folder / "tensorboard"), "--tensorboard-log-interval", "1"]
            length = iterations(ITERATIONS, evaluate=True)
            run = ranks.train([*MODEL, *words(flags), *length, *measuring], world_size).check()
            ledgers = [
                [json.loads(line) for line in (folder / f"ledger.rank{rank}.jsonl").read_text().splitlines()]
                for rank in range(world_size)
            ]
            state = dist_checkpointing.load_common_state_dict(str(folder / f"iter_{ITERATIONS:07d}"))
            operations = state["num_floating_point_operations_so_far"]
            known[name] = Measured(run, ledgers, operations, _scalars(folder / "tensorboard"))
        return known[name]

    return train


def _scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Return what TensorBoard would show: for each scalar its value at each iteration."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_the_ledger_agrees_with_the_closed_form(name: str, measured: Callable[[str], Measured]) -> None:
    output = measured(name).run.output
    assert output.count("measured and closed form agree exactly") == 1, "rank 0 says so, and no rank says otherwise"
    assert ("nothing is exchanged" in output) == (name == "one rank")


@pytest.mark.parametrize(
    "name, layers, unit, copies",
    [
        ("one rank", 0, 0, []),
        ("tp2 x cp2", 4, UNIT // 2, ["clean", "corrupted"]),
        ("interleaved pp2 x csbp2 with recomputation in bf16", 2, UNIT // 2, ["clean"]),
    ],
)
def test_every_rank_has_a_line_of_every_iteration_with_the_bytes_of_the_formula(
    name: str, layers: int, unit: int, copies: list[str], measured: Callable[[str], Measured]
) -> None:
    once = layers * MICRO_BATCHES * unit
    for rank, lines in enumerate(measured(name).ledgers):
        assert [(line["iteration"], line["phase"]) for line in lines] == [
            *((iteration, "train") for iteration in range(1, ITERATIONS + 1)),
            (ITERATIONS, "evaluate"),
        ]
        assert {line["rank"] for line in lines} == {rank}
        for line in lines[:ITERATIONS]:
            moved: Counter[str] = Counter()
            for transfer in line["transfers"]:
                moved[transfer["tensors"]] += transfer["remote_bytes"]
            assert moved == {f"{copy} K/V": 2 * once for copy in copies} | {f"{copy} dK/dV": once for copy in copies}
            assert len({transfer["layer"] for transfer in line["transfers"]}) == (layers if copies else 0)
            assert line["remote_bytes"] == 3 * once * len(copies)


def test_megatron_counts_the_same_operations_in_every_topology(measured: Callable[[str], Measured]) -> None:
    operations = [measured(name).operations for name in TOPOLOGIES]
    assert operations == [pytest.approx(operations[0], rel=1e-9)] * len(TOPOLOGIES)
    # Layers and pairs alone, with no logits and with those of all corrupted rows.
    rows, pairs = 2 * SEQUENCE_LENGTH, 8 * 64 + (64 * 64 - 8 * 64) // 2 + 64 * 65 // 2
    layer = rows * 6 * (64 * (64 + 2 * 32 + 64) + 3 * 64 * 128) + pairs * 12 * 64
    least = ITERATIONS * MICRO_BATCHES * 4 * layer
    assert least < operations[0] < least + ITERATIONS * MICRO_BATCHES * SEQUENCE_LENGTH * 6 * 64 * 192


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_exposed_communication_and_clean_tokens_per_second_are_logged(
    name: str, measured: Callable[[str], Measured]
) -> None:
    output = measured(name).run.output
    rates = re.findall(PROGRESS, output)
    assert [int(iteration) for iteration, _ in rates] == list(range(1, ITERATIONS + 1))
    times = [
        float(time) for time in re.findall(r"iteration +\d+/.* elapsed time per iteration \(ms\): ([\d.]+)", output)
    ]
    # Megatron's line after the first iteration resets nothing, so the second time is the mean of both.
    times[1] = 2 * times[1] - times[0]
    tokens = MICRO_BATCHES * SEQUENCE_LENGTH
    for (_, rate), milliseconds in zip(rates, times, strict=True):
        assert float(rate) * milliseconds / 1000 == pytest.approx(tokens, rel=0.02)
    total = re.findall(r"clean tokens: (\d+) \| TFLOP/s per rank: [\d.e+-]+ \|", output)
    assert total == [str(tokens * iteration) for iteration in range(1, ITERATIONS + 1)]
    exposed = output.count("csbp-exposed-communication ..")
    assert exposed == (0 if name == "one rank" else ITERATIONS)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_tensorboard_shows_exposed_communication_and_the_logged_rates(
    name: str, measured: Callable[[str], Measured]
) -> None:
    found = measured(name)
    rates = re.findall(PROGRESS, found.run.output)
    assert found.scalars["clean-tokens-per-second"] == {
        int(iteration): pytest.approx(float(rate), abs=0.051) for iteration, rate in rates
    }
    exposed = found.scalars.get("csbp-exposed-communication-time", {})
    # Megatron leaves out timers that are 0 on all ranks.
    assert list(exposed) == ([] if name == "one rank" else list(range(1, ITERATIONS + 1)))
    assert all(0 < seconds < 60 for seconds in exposed.values())


def test_a_run_that_only_evaluates_has_a_ledger_of_it(ranks: Ranks, tmp_path: Path) -> None:
    flags = [*MODEL, *words("--context-parallel-size 2 --bp-size 2 --skip-train --eval-micro-batch-size 2")]
    flags += [*iterations(ITERATIONS, evaluate=True), "--csbp-ledger", str(tmp_path / "bytes.jsonl")]
    output = ranks.train(flags, 2).check().output
    assert "measured and closed form agree exactly" in output
    lines = [json.loads(line) for line in (tmp_path / "bytes.rank1.jsonl").read_text().splitlines()]
    assert {line["phase"] for line in lines} == {"evaluate"}
    assert sum(line["remote_bytes"] for line in lines) == 4 * 2 * UNIT * sum(line["forward_steps"] for line in lines)


@pytest.mark.parametrize(
    "topology", ["--bp-size 2 --context-parallel-size 2", "--context-parallel-size 2 --context-scheme cp"]
)
def test_gated_delta_nets_move_what_their_closed_form_says(topology: str, ranks: Ranks, tmp_path: Path) -> None:
    """Two of the three delta nets run again in the backward pass."""
    flags = [*HYBRID, *BLOCK_DIFFUSION, *words(topology), *iterations(1, evaluate=True)]
    flags += words("--recompute-granularity full --recompute-method block --recompute-num-layers 2")
    run = ranks.train([*flags, "--csbp-ledger", str(tmp_path / "bytes.jsonl")], 2).check()
    assert run.output.count("measured and closed form agree exactly") == 1
    lines = [json.loads(line) for line in (tmp_path / "bytes.rank1.jsonl").read_text().splitlines()]
    moved: Counter[str] = Counter()
    for transfer in lines[0]["transfers"]:
        moved[transfer["tensors"]] += transfer["remote_bytes"]
    if "--bp-size" not in topology:
        assert moved["clean rows by heads"] == moved["corrupted rows by heads"] > 0
        return
    micro_batches, passes = 2, 3 + 3 + 2  # forward, backward, and forward again in two layers
    maps = 2 * 8 * 16 * (16 + 8) * 4  # 2 (P-1) x H x K x (K+V) x itemsize, whatever L is
    rows = 2 * 3 * (2 * 4 * 16 + 8 * 8) * 4  # 2 (P-1) x 3 rows x channels x itemsize
    assert moved["clean state maps"] == micro_batches * passes * maps
    assert moved["clean convolution rows"] == micro_batches * passes * rows
    assert not {name for name in moved if name.startswith("corrupted")}
