# SPDX-License-Identifier: Apache-2.0
"""NELBO and perplexity of a checkpoint: those that training reports, with the same noise every time."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megatron_csbp.data import prepare
from tests.functional.model_flags import CSBP2, NEMOTRON, TIED, iterations, words
from tests.functional.test_data import without
from tests.support.megatron_run import ROOT, Finished, Ranks

TOLERANCE = 2e-6


@dataclass(frozen=True)
class Text:
    """A text, prepared, and the flags of a model that is trained on it."""

    source: Path
    prefix: Path
    flags: list[str]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    folder, source = tmp_path_factory.mktemp("text"), ROOT / "megatron_csbp" / "errors.py"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=180, special_tokens=["<end>"], show_progress=False)
    tokenizer.train_from_iterator([source.read_text()], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder / "tokenizer")
    tokenizing = ["--tokenizer", str(folder / "tokenizer"), "--append-eod"]
    prepare.main(["--input", str(source), "--output-prefix", str(folder / "text"), *tokenizing])
    data = [f"--{split}-data-path={folder / 'text'}" for split in ("train", "valid")]
    flags = [
        *without(TIED, "--mock-data", "--tokenizer-type", "--vocab-size", "--split", "--eval-interval"),
        *words(f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder / 'tokenizer'}"),
        *words("--eval-interval 3 --full-validation --multiple-validation-sets"),
        *[word for flag in data for word in flag.split("=")],
        *iterations(3, evaluate=True),
    ]
    return Text(source, folder / "text", flags)


def evaluate(ranks: Ranks, output: Path, flags: list[str], world_size: int = 1) -> Finished:
    request = {"module": "megatron_csbp.evaluate", "arguments": [*flags, "--json", str(output)]}
    return ranks.call("tests.support.command:run", request, world_size)


def test_a_checkpoint_has_the_nelbo_that_its_training_reported(text: Text, ranks: Ranks, tmp_path: Path) -> None:
    """From its text, in one process; from prepared data, on two ranks; and again."""
    trained = ranks.train([*text.flags, *NEMOTRON, "--save", str(tmp_path / "saved")]).check()
    load = ["--load", str(tmp_path / "saved"), "--seed", "7"]
    one = evaluate(ranks, tmp_path / "one.json", [*load, "--text", str(text.source)]).check()
    prepared = [*load, "--valid-data-path", str(text.prefix)]
    evaluate(ranks, tmp_path / "two.json", [*prepared, *CSBP2], 2).check()
    evaluate(ranks, tmp_path / "again.json", prepared).check()
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two", "again")}
    expected = {"nelbo": trained.evaluated("nelbo")[-1], "ar_loss": trained.evaluated("ar loss")[-1]}
    for figures in found.values():
        for name, value in expected.items():
            assert figures[name] == pytest.approx(value, rel=TOLERANCE)
    assert {**found["one"], "checkpoint": ""} == {**found["again"], "checkpoint": ""}
    assert found["one"]["ar_perplexity"] == pytest.approx(math.exp(expected["ar_loss"]), rel=TOLERANCE)
    assert found["one"]["samples"] * found["one"]["tokens_per_sample"] > 1000
    nelbo, perplexity = expected["nelbo"], found["one"]["ar_perplexity"]
    line = f"NELBO {nelbo:.4f} nats/token, AR loss {expected['ar_loss']:.4f} nats/token, perplexity {perplexity:.3f}; "
    assert line in one.output


def test_an_autoregressive_checkpoint_has_a_perplexity_only(text: Text, ranks: Ranks, tmp_path: Path) -> None:
    trained = ranks.train([*text.flags, "--save", str(tmp_path / "saved")]).check()
    flags = ["--load", str(tmp_path / "saved"), "--seed", "7", "--text", str(text.source)]
    evaluate(ranks, tmp_path / "figures.json", flags).check()
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["ar_loss"] == pytest.approx(trained.evaluated("lm loss")[-1], rel=TOLERANCE)
    assert "nelbo" not in figures


def test_what_cannot_be_evaluated_is_refused(text: Text, ranks: Ranks, tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    nowhere = evaluate(ranks, output, ["--load", str(tmp_path), "--text", str(text.source)])
    assert nowhere.returncodes == [2]
    assert f"--load {tmp_path} is not a folder of Megatron checkpoints" in nowhere.output
    assert not output.exists()
    unwritable = evaluate(ranks, tmp_path / "none" / "a.json", ["--load", str(tmp_path), "--text", str(text.source)])
    assert unwritable.returncodes == [2]
    assert "a.json is a folder, or in one that does not exist; name a file." in unwritable.output
