# SPDX-License-Identifier: Apache-2.0
"""Every command that the documentation shows for GPUs passes Megatron's own validation as on a Hopper GPU."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.functional.model_flags import MODEL, TRAINING, words
from tests.support.megatron_run import ROOT, Ranks

PAGES = ("README.md", "examples/README.md", "docs/gpu.md")
ENTRY = re.compile(r"-m megatron_csbp\.(?:pretrain_gpt|launch (?:\S*/)?pretrain_gpt\.py)")
NEED_FILES = ("--tokenizer-model", "--data-path", "--pretrained-checkpoint", "--load", "--save", "--split")
WITHOUT_DATA = words("--mock-data --tokenizer-type NullTokenizer --split 90,5,5")
# Mock data count to 4,094 at most, and hold the mask token of Nemotron-Labs-Diffusion.
MASK = words("--mask-token-id 5000")
# What `$ARGS` of the README may be, and the vocabulary of a recipe's tokenizer.
OWN_ARGUMENTS = [*MODEL, *TRAINING, *words("--num-layers 2 --num-query-groups 2 --micro-batch-size 1 --bf16")]
OWN_ARGUMENTS += words("--seq-length 512 --max-position-embeddings 512 --global-batch-size 8 --train-iters 2")
VOCABULARY = {"nemotron": "131071", "qwen_ar_to_bdlm": "151668"}


def commands() -> dict[str, tuple[int, str]]:
    """Return world size and arguments of each command with torchrun, by page and number."""
    found = {}
    for page in PAGES:
        # A line of a diff that goes starts with a minus.
        lines = [line.removeprefix("+") for line in (ROOT / page).read_text().splitlines() if not line.startswith("-")]
        for number, command in enumerate(re.findall(r"^ *torchrun (?:.*\\\n)*.*", "\n".join(lines), re.MULTILINE)):
            joined = command.replace("\\\n", " ")
            entry = ENTRY.search(joined)
            # The quickstart is for CPUs, and its own test runs it.
            if entry is None or "$FLAGS" in joined:
                continue
            sizes = [int(size) for size in re.findall(r"--(?:nnodes|nproc-per-node) (\d+)", joined[: entry.start()])]
            world_size = 8 if not sizes else sizes[0] * (sizes[1] if len(sizes) > 1 else 1)
            found[f"{page} {number}"] = (world_size, joined[entry.end() :])
    return found


COMMANDS = commands()


def complete(arguments: str) -> list[str]:
    """Put mock data in place of files that are not here, and arguments of our own in place of `$ARGS`."""
    kept: list[str] = []
    given = shlex.split(arguments.replace("...", ""))
    while given:
        word = given.pop(0)
        if word == "$ARGS":
            kept += OWN_ARGUMENTS
        elif word == "--mask-token-id" and given[0] == "ID":
            kept += [word, "100"]
            given.pop(0)
        elif word in NEED_FILES:
            given.pop(0)
        else:
            kept.append(word)
    kept += WITHOUT_DATA
    for model, size in VOCABULARY.items():
        if any(model in word for word in kept):
            kept += ["--vocab-size", size, *MASK]
    return kept


def validated(arguments: list[str], world_size: int, ranks: Ranks, folder: Path) -> dict[str, Any]:
    request = {
        "arguments": arguments,
        "world_size": world_size,
        "facts": str(folder / "facts.json"),
        "as_on_hopper": True,
    }
    ranks.call("tests.support.example_arguments:validate", request).check()
    facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    return facts


def test_the_pages_show_commands() -> None:
    assert {name.split()[0] for name in COMMANDS} == set(PAGES)
    assert sorted(size for size, _ in COMMANDS.values())[-1] == 16


@pytest.mark.parametrize("name", COMMANDS)
def test_a_documented_command_passes_megatrons_validation_on_hopper(name: str, ranks: Ranks, tmp_path: Path) -> None:
    world_size, arguments = COMMANDS[name]
    facts = validated(complete(arguments), world_size, ranks, tmp_path)
    assert facts["diffusion_scheme"] == "CSBP"
    assert facts["block_parallel_size"] == 8


def test_what_the_job_script_would_run_passes_too(ranks: Ranks, tmp_path: Path) -> None:
    script = ["bash", "examples/slurm/pretrain.sbatch", "--dry-run"]
    script += words("--yaml-cfg examples/nemotron_diffusion/8b_256k.yaml")
    environment = os.environ | {"PYTHON": sys.executable, "SLURM_NNODES": "2"}
    run = subprocess.run(script, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    command = next(line for line in run.stdout.splitlines() if line.startswith("srun "))
    entry = ENTRY.search(command)
    assert entry is not None
    facts = validated(complete(command[entry.end() :]), 16, ranks, tmp_path)
    assert facts["diffusion_scheme"] == "CSBP"
