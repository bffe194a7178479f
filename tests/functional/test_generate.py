# SPDX-License-Identifier: Apache-2.0
"""Text from checkpoints: the cached passes are those of the model that was trained, on any tensor-parallel size.

The reference is the training model itself, which reads both copies of a whole sequence without any cache: its
corrupted copy holds a block as it was when it was scored, its clean copy the text as it came out.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.functional.model_flags import (
    BLOCK_DIFFUSION,
    BLOCKS,
    MOE,
    NEMOTRON,
    TIED,
    TP2,
    UNTIED_MQA,
    iterations,
    words,
)
from tests.support.generation_probe import generate
from tests.support.megatron_run import ROOT, Ranks, environment
from tests.support.model_probe import probe

LENGTH, BLOCK, MASK, VOCAB = 64, 8, 190, 187
PROMPTS = [" ".join(map(str, range(3, 3 + length))) for length in (13, 16, 1)]
PROMPT_FLAGS = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
YARN = words(
    "--position-embedding-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 16 "
    "--mscale 1 --mscale-all-dim 1 --query-scale-beta 0.5"
)
MODELS = {
    "nemotron": [*TIED, *NEMOTRON, *YARN, "--qk-layernorm"],
    "block-diffusion": [*UNTIED_MQA, *BLOCK_DIFFUSION, *words("--position-embedding-type learned_absolute")],
    "moe": [*MOE, *NEMOTRON],
    "fast-dllm-v2": [*UNTIED_MQA, *BLOCKS, *words("--diffusion-objective fast-dllm-v2")],
}
READ_BY = {"fast-dllm-v2": [*UNTIED_MQA, *BLOCK_DIFFUSION]}
"""Flags of the same model with one corrupted copy, which is what one block at a time is."""


class Trained:
    """Checkpoints of a few steps, made when they are first asked for."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self._ranks, self._folder = ranks, folder

    def __getitem__(self, model: str) -> Path:
        path = self._folder / model
        if not path.exists():
            self._ranks.train([*MODELS[model], *iterations(3), "--save", str(path), "--no-save-optim"]).check()
        return path


@pytest.fixture(scope="module")
def trained(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(ranks, tmp_path_factory.mktemp("trained"))


def write(ranks: Ranks, checkpoint: Path, folder: Path, flags: str, world_size: int = 1) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    arguments = ["--load", str(checkpoint), *PROMPT_FLAGS, *words("--max-new-tokens 30"), *words(flags)]
    return generate(ranks, folder, arguments, world_size)


def texts(facts: dict[str, Any]) -> list[list[int]]:
    """Prompts and what was written behind them."""
    return [[*prompt, *new] for prompt, new in zip(facts["prompts"], facts["tokens"], strict=True)]


def dense_logits(ranks: Ranks, checkpoint: Path, model: str, folder: Path, facts: dict[str, Any]) -> list[Tensor]:
    """Score every state of every block with the training model, uncached, all at once; one [L, V] for each.

    The corrupted copy holds the text before the block and masks behind it.
    """
    clean, corrupted = [], []
    for text, passes in zip(texts(facts), facts["passes"], strict=True):
        whole = [*text, *[0] * LENGTH][:LENGTH]
        for entry in (entry for entry in passes if entry["kind"] == "denoise"):
            start = entry["start"]
            clean.append(whole)
            corrupted.append([*whole[:start], *entry["tokens"], *[MASK] * LENGTH][:LENGTH])
    folder.mkdir()
    flags = READ_BY.get(model, MODELS[model])
    flags = [*flags, *iterations(1), *words(f"--load {checkpoint} --finetune --no-load-optim")]
    logits = probe(ranks, folder, flags, torch.tensor(clean), torch.tensor(corrupted), load=True)
    return list(logits.corrupted)


def by_the_rule(logits_RV: Tensor, threshold: float) -> tuple[list[int], list[bool]]:
    """What one pass keeps of the masked rows, written down plainly."""
    kept: list[bool] = []
    tokens: list[int] = []
    probabilities: list[float] = []
    for row_V in logits_RV:
        allowed_V = row_V[:VOCAB].clone()
        probability_V = torch.softmax(allowed_V.double(), 0)
        tokens.append(int(probability_V.argmax()))
        probabilities.append(float(probability_V.max()))
    surest = max(range(len(tokens)), key=lambda row: probabilities[row])
    kept = [p >= threshold or row == surest for row, p in enumerate(probabilities)]
    return tokens, kept


@pytest.mark.parametrize(
    "model, shifts, threshold",
    [
        pytest.param("nemotron", False, 0.007, id="nemotron"),
        pytest.param("block-diffusion", False, 0.007, id="block-diffusion", marks=pytest.mark.slow),
        pytest.param("fast-dllm-v2", True, 0.007, id="fast-dllm-v2, shifted"),
        pytest.param("moe", False, 2.0, id="moe", marks=pytest.mark.slow),
    ],
)
def test_blocks_are_those_of_an_uncached_dense_decoder(
    model: str, shifts: bool, threshold: float, ranks: Ranks, trained: Trained, tmp_path: Path
) -> None:
    (facts,) = write(ranks, trained[model], tmp_path / "cached", f"--confidence-threshold {threshold}")
    dense = iter(dense_logits(ranks, trained[model], model, tmp_path / "dense", facts))
    kept_at_once = 0
    for text, passes in zip(texts(facts), facts["passes"], strict=True):
        states = [entry for entry in passes if entry["kind"] == "denoise"]
        for number, entry in enumerate(states):
            start, tokens, logits_LV = entry["start"], torch.tensor(entry["tokens"]), next(dense)
            assert torch.allclose(entry["logits"], logits_LV[start : start + BLOCK], atol=1e-5, rtol=0)
            rows_R = (tokens == MASK).nonzero()[:, 0]
            chosen, kept = by_the_rule(logits_LV[start + rows_R - int(shifts)], threshold)
            kept_at_once = max(kept_at_once, sum(kept))
            for row, token, keeps in zip(rows_R.tolist(), chosen, kept, strict=True):
                if keeps:
                    tokens[row] = token
            following = states[number + 1] if number + 1 < len(states) else None
            if MASK in tokens:
                assert following is not None
                assert following["tokens"] == tokens.tolist()
            else:
                expected = text[start : start + BLOCK]
                assert tokens.tolist()[: len(expected)] == expected
        if shifts:
            assert MASK not in {entry["tokens"][0] for entry in states}
    assert next(dense, None) is None
    assert (kept_at_once > 1) == (threshold < 1)


def test_autoregression_is_that_of_an_uncached_dense_model(ranks: Ranks, trained: Trained, tmp_path: Path) -> None:
    (facts,) = write(ranks, trained["nemotron"], tmp_path / "cached", "--decoding autoregressive")
    folder = tmp_path / "dense"
    folder.mkdir()
    clean = torch.tensor([[*text, *[0] * LENGTH][:LENGTH] for text in texts(facts)])
    flags = [*MODELS["nemotron"], *iterations(1), *words(f"--load {trained['nemotron']} --finetune --no-load-optim")]
    dense = probe(ranks, folder, flags, clean, clean, load=True).clean
    for text, prompt, passes, logits_LV in zip(texts(facts), facts["prompts"], facts["passes"], dense, strict=True):
        assert len(text) == len(prompt) + 30
        for entry in passes:
            last = entry["start"] + len(entry["tokens"]) - 1
            assert torch.allclose(entry["logits"], logits_LV[last], atol=1e-5, rtol=0)
            assert text[last + 1] == int(logits_LV[last, :VOCAB].argmax())


@pytest.mark.parametrize("flags", ["--confidence-threshold 0.007", "--steps-per-block 3 --temperature 1.3 --seed 5"])
def test_two_tensor_parallel_ranks_write_what_one_writes(
    flags: str, ranks: Ranks, trained: Trained, tmp_path: Path
) -> None:
    (one,) = write(ranks, trained["nemotron"], tmp_path / "one", flags)
    two = write(ranks, trained["nemotron"], tmp_path / "two", " ".join([flags, *TP2]), 2)
    assert [rank["tokens"] for rank in two] == [one["tokens"]] * 2


def test_the_command_prints_the_text_and_each_step(trained: Trained) -> None:
    """Without torchrun. Standard output holds nothing else."""
    command = [sys.executable, "-m", "megatron_csbp.generate", "--load", str(trained["nemotron"]), "--prompt", "3 4 5"]
    command += words("--max-new-tokens 5 --steps-per-block 2 --show-steps")
    run = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
    lines = run.stdout.splitlines()
    text = next(line for line in lines if line.startswith("3 4 5 ") and "_" not in line)
    assert len(text.split()) == 8
    assert lines == [
        "[0, pass 0, 5 masked] 3 4 5_____",
        *[line for line in lines if line.startswith("[0, pass 1, 2 masked] 3 4 5")],
        f"[0, pass 2, 0 masked] {text}",
        text,
    ]
    assert "megatron_csbp: 5 tokens in 2 passes" in run.stderr


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--prompt 3 --decoding autoregressive", "never learnt to predict the next one"),
        ("--prompt 3 --confidence-threshold 0.5 --steps-per-block 2", "give one of them"),
        ("--prompt 3 --max-new-tokens 64", "the checkpoint has 64 position embeddings"),
        ("--prompt 3 --pipeline-model-parallel-size 2", "leave the flag out"),
        ("--prompt 3 --ckpt-step 9", "has no checkpoint iter_0000009; it has iter_0000003"),
        ("", "no prompt"),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_collective(
    flags: str, message: str, ranks: Ranks, trained: Trained, tmp_path: Path
) -> None:
    arguments = ["--load", str(trained["block-diffusion"]), *words(flags)]
    request = {"arguments": arguments, "folder": str(tmp_path)}
    run = ranks.call("tests.support.generation_probe:run", request, 1)
    assert run.returncodes == [1]
    assert "ValueError: " in run.output
    assert message in run.output
