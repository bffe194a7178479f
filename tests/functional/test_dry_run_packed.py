# SPDX-License-Identifier: Apache-2.0
"""The planner on packed documents, whose samples differ in rows: against real runs, and by its command."""

import json
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from tests.functional.model_flags import BLOCK_DIFFUSION, CSBP2, HYBRID, NEMOTRON, TIED, iterations, words
from tests.support.megatron_run import Ranks
from tests.support.planner_probe import check_measured

PROBE = "tests.support.planner_probe"
LENGTH = 256
PACKED = words(f"--pack-documents --seq-length {LENGTH} --max-position-embeddings {LENGTH} --split 1,0,0")


def without_mock_data(model: list[str]) -> list[str]:
    return [word for word in model if word != "--mock-data"]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Documents of many lengths, each with an answer: its last fifth."""
    path = tmp_path_factory.mktemp("documents") / "chats"
    texts = IndexedDatasetBuilder(f"{path}.bin", dtype=np.uint16)
    marks = IndexedDatasetBuilder(f"{path}.loss.bin", dtype=np.uint8)
    generator = np.random.default_rng(3)
    for length in generator.integers(5, 150, 80).tolist():
        texts.add_document(generator.integers(0, 180, length), [length])
        marks.add_document((np.arange(length) >= 0.8 * length).astype(np.uint8), [length])
    texts.finalize(f"{path}.idx")
    marks.finalize(f"{path}.loss.idx")
    return str(path)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param([*TIED, *NEMOTRON, *CSBP2], id="csbp"),
        pytest.param([*TIED, *NEMOTRON, *words("--context-parallel-size 2 --context-scheme cp")], id="cp"),
        pytest.param([*HYBRID, *BLOCK_DIFFUSION, *CSBP2], id="delta nets", marks=pytest.mark.slow),
    ],
)
def test_memory_bytes_and_operations_are_those_of_a_real_sample(
    model: list[str], prefix: str, ranks: Ranks, tmp_path: Path
) -> None:
    flags = [*without_mock_data(model), *PACKED, "--data-path", prefix, "--bf16", "--device", "cpu"]
    flags += [*iterations(1), *words("--global-batch-size 1"), "--csbp-ledger", str(tmp_path / "bytes.jsonl")]
    ranks.train(flags, 2, hooks=[f"{PROBE}:measure"]).check()
    check_measured(tmp_path, 2)


def test_the_command_plans_the_median_sample_and_the_memory_of_the_fullest(
    prefix: str, ranks: Ranks, tmp_path: Path
) -> None:
    flags = [*without_mock_data(TIED), *NEMOTRON, *CSBP2, *PACKED, "--data-path", prefix, *iterations(1)]
    files = {"answers": tmp_path / "answers.json", "all": tmp_path / "all.json"}
    outputs = {}
    for loss_on, file in files.items():
        arguments = ["--gpus", "2", *flags, "--loss-on", loss_on, "--sweep", "--json", str(file)]
        outputs[loss_on] = ranks.call(f"{PROBE}:plan", {"arguments": arguments}).check().output
    assert "the one with most rows for memory" in outputs["answers"]
    answers, everything = (json.loads(file.read_text()) for file in files.values())
    packed = answers["packed_samples"]
    assert packed["number"] > 10
    assert (
        LENGTH < packed["median"]["rows"] < packed["fullest"]["rows"] < everything["packed_samples"]["median"]["rows"]
    )
    assert 2 * LENGTH * 0.85 < everything["packed_samples"]["median"]["rows"] <= 2 * LENGTH
    assert answers["rows"] == pytest.approx(packed["median"]["rows"] / 2, abs=8)
    for part in ("linear", "attention", "logits", "total"):
        assert answers["operations_of_a_sample"][part] < everything["operations_of_a_sample"][part]
    assert answers["memory"][0]["total"] < everything["memory"][0]["total"]
    assert answers["time"]["seconds"] < everything["time"]["seconds"]
    refused = ranks.call(f"{PROBE}:plan", {"arguments": ["--gpus", "2", *flags, "--tiles"]})
    assert refused.returncodes == [2]
    assert "plan without --tiles" in refused.output
