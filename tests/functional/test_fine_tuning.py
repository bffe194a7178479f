# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning on conversations: packed documents count like documents alone, and the mask token's row starts well."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_csbp.data.packed_dataset import LOSS_SUFFIX
from tests.functional.model_flags import BLOCKS, CSBP2, CSBP4, TIED, TP2, UNTIED_MQA, iterations, words
from tests.functional.test_data import without
from tests.support.checkpoint_tensors import load_parameters
from tests.support.forked_module import run_module
from tests.support.megatron_run import ROOT, Ranks
from tests.unit_tests.data.support import write_indexed

TOLERANCE = 1e-5
LENGTHS = [13, 21, 6, 10]
"""With blocks of 8 they take 16, 24, 8 and 16 of 64 positions."""
CASES = {
    "nemotron": ("nemotron", [], 1),
    "fast-dllm-v2, csbp2": ("fast-dllm-v2", CSBP2, 2),
    "nemotron, csbp2": ("nemotron", CSBP2, 2),
    "block-diffusion, csbp2": ("block-diffusion", CSBP2, 2),
    "block-diffusion, csbp4": ("block-diffusion", CSBP4, 4),
    "nemotron, tp2 x csbp2, sequence parallel": ("nemotron", [*TP2, "--sequence-parallel", *CSBP2], 4),
}
SEEN_EVERY_TIME = {"nemotron", "fast-dllm-v2, csbp2"}


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four documents, the last part of each an answer, but for one that has none."""
    prefix, generator = tmp_path_factory.mktemp("conversations") / "data", np.random.default_rng(0)
    write_indexed(prefix, [generator.integers(0, 180, length) for length in LENGTHS])
    answers = [(np.arange(length) >= 0.4 * length) & (length != 6) for length in LENGTHS]
    return write_indexed(Path(f"{prefix}{LOSS_SUFFIX}"), answers, np.uint8).removesuffix(LOSS_SUFFIX)


@pytest.fixture(
    scope="module",
    params=[name if name in SEEN_EVERY_TIME else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def results(
    request: pytest.FixtureRequest, conversations: str, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    objective, topology, world_size = CASES[request.param]
    folder = tmp_path_factory.mktemp("results")
    flags = [*without(TIED, "--mock-data", "--split"), *BLOCKS, "--diffusion-objective", objective, *topology]
    flags += ["--data-path", conversations, *words("--split 1,0,0 --pack-documents"), *iterations(1)]
    flags.append("--no-check-for-nan-in-loss-and-grad")  # which Megatron does in its own loop only
    ranks.call("tests.support.packing_probe:run", {"arguments": flags, "folder": str(folder)}, world_size).check()
    return [torch.load(folder / f"gradients{rank}.pt") for rank in range(world_size)]


def test_a_packed_sample_is_the_sum_of_its_documents(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        assert of_rank["documents"] == len(LENGTHS)
        assert compare(of_rank["packed"], of_rank["alone"]) < TOLERANCE


def test_padding_and_other_documents_change_nothing_bit_for_bit(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        for one, other in (("packed", "padding"), ("quiet", "changed")):
            assert compare(of_rank[one], of_rank[other]) == 0.0
        assert of_rank["quiet"]["loss"] != of_rank["packed"]["loss"]


def compare(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return the worst relative difference of loss and gradients; the denominators are equal."""
    assert int(found["tokens"]) == int(expected["tokens"]) > 0
    pairs = [(found["loss"], expected["loss"])]
    pairs += [(gradient, expected["gradients"][name]) for name, gradient in found["gradients"].items()]
    assert len(pairs) > 8
    assert all(value.norm() > 0 for _, value in pairs)
    return max(((one - other).norm() / other.norm()).item() for one, other in pairs)


@pytest.fixture(scope="module")
def commands() -> str:
    return re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "fine_tuning.md").read_text(), flags=re.DOTALL)[0]


def test_the_page_trains_on_answers_as_printed_by_both_entries(
    commands: str, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shell reads the page; what it would start runs here: modules in this process, torchrun's on forked ranks."""
    noted = tmp_path / "noted"
    note = f'{{ printf "%s\\t" "$@" >> {noted}; echo >> {noted}; }}'
    functions = (
        f'torchrun() {note}\nnote() {note}\npython() {{ [ "$1" = -m ] && note "$@" || command python "$@"; }}\n'
    )
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(["bash", "-ec", functions + commands], cwd=tmp_path, env=os.environ | {"PATH": path}, check=True)
    monkeypatch.chdir(tmp_path)
    script = str(ROOT / "tests/functional/stock_shape_pretrain_gpt.py")
    losses = []
    for line in noted.read_text().splitlines():
        command = line.rstrip("\t").split("\t")
        if command[0] == "-m":
            assert importlib.import_module(command[1]).main(command[2:]) == 0
            continue
        places = {"chat/tokenizer": str(tmp_path / "chat/tokenizer"), "chat/data": str(tmp_path / "chat/data")}
        places["pretrain_gpt.py"] = script
        run = run_module(ranks, [places.get(word, word) for word in command]).check()
        assert "mask token 1: '<|mask|>', the mask that the tokenizer declares" in run.output
        assert "of the tokens are learnt (by generation markers of the chat template)" in run.output
        losses.append(re.findall(r"\| lm loss: (\S+) \|", run.output))
    assert "marked in chat/data.loss.bin by generation markers of the chat template" in capsys.readouterr().err
    assert len(losses) == 2
    assert len(losses[0]) == 2
    assert losses[0] == losses[1]


def test_a_conversion_starts_the_mask_tokens_rows_as_the_mean(ranks: Ranks, tmp_path: Path) -> None:
    model = words("--no-save-optim --no-save-rng --lr 0 --min-lr 0")
    model = [*without(UNTIED_MQA, "--lr", "--min-lr"), *model, *iterations(1)]
    ranks.train([*model, "--save", str(tmp_path / "autoregressive")]).check()
    before = load_parameters(tmp_path / "autoregressive", 1)
    conversion = [*model, *BLOCKS, "--load", str(tmp_path / "autoregressive"), "--finetune", "--save"]
    one = ranks.train([*conversion, str(tmp_path / "one")]).check()
    said = one.output.partition("  start:")[2]
    assert "the row of mask token 190 starts as the mean of the 187 trained rows" in said, said[:400]
    mixed = words("--bf16 --use-distributed-optimizer")  # which copies the weights once they are loaded
    ranks.train([*conversion, str(tmp_path / "two"), *TP2, *mixed], 2).check()
    ones, twos = load_parameters(tmp_path / "one", 1), load_parameters(tmp_path / "two", 1)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        mean = before[name][:187].double().mean(0).float()
        assert torch.equal(ones[name][190], mean)
        kept = [row for row in range(len(mean)) if row != 190]
        assert torch.equal(ones[name][kept], before[name][kept])
        torch.testing.assert_close(twos[name][190].float(), mean, rtol=1e-2, atol=1e-4)
    resumed = [*model, *BLOCKS, *words("--train-iters 2 --init-mask-token mean --no-load-optim --no-load-rng --load")]
    assert "the row of mask token" not in ranks.train([*resumed, str(tmp_path / "one")]).check().output
