# SPDX-License-Identifier: Apache-2.0
"""Every command that a page shows can be typed: its module exists and takes its flags, and its make target exists.

What runs is elsewhere: the quickstart (tests/functional/test_quickstart.py), the commands for GPUs, which pass
Megatron's validation (test_gpu_commands.py), and each tool in tests of its own.
"""

import argparse
import functools
import importlib
import importlib.util
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_csbp.configuration.unsupported_features import UNSUPPORTED
from megatron_csbp.data import prepare, train_tokenizer
from megatron_csbp.generation.arguments import add_arguments as add_generation_arguments
from megatron_csbp.tools.dry_run import command
from megatron_csbp.tools.gpu_check import __main__ as gpu_check
from megatron_csbp.weights import __main__ as weights
from tests.support.megatron_arguments import parser as training_parser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples/README.md", ROOT / "benchmarks/RESULTS.md"]
PAGES += sorted(set((ROOT / "docs").rglob("*.md")) - {ROOT / "docs/adr/template.md"})
OF_TORCHRUN = ("--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-id", "--rdzv-endpoint", "--max-restarts")
# Of either entry, before Megatron's parser sees the line.
OF_ENTRIES = ("--csbp-dry-run", "--help")
PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "megatron_csbp.data.prepare": prepare.build_parser,
    "megatron_csbp.dry_run": command.parser,
    "megatron_csbp.data.train_tokenizer": train_tokenizer.build_parser,
    "megatron_csbp.weights": weights.build_parser,
    "megatron_csbp.tools.gpu_check": gpu_check._parser,
}
ENTRIES = ("megatron_csbp.pretrain_gpt", "megatron_csbp.launch", "megatron_csbp.generate", "megatron_csbp.evaluate")
# These take flags of their own and those of a training run.
TAKE_BOTH = ("megatron_csbp.doctor", "megatron_csbp.dry_run", "megatron_csbp.migrate")
OF_EVALUATE = ("--text", "--json")


def code_blocks(text: str) -> Iterator[str]:
    """Yield the fenced and the indented code of a page."""
    yield from re.findall(r"^```(?:bash|diff|console|sh)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    yield from re.findall(
        r"(?:^ {4}.*\n)+", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    )


def commands(page: Path) -> list[str]:
    """Return the lines of a page's code in which a command stands, continuations joined."""
    lines = []
    for block in code_blocks(page.read_text()):
        kept = [line.removeprefix("+") for line in block.splitlines() if not line.startswith("-")]
        lines += re.sub(r"\\\n\s*", " ", "\n".join(kept)).splitlines()
    return [line.strip() for line in lines if re.search(r"-m (megatron_csbp|benchmarks)[.\w]*|^\s*make ", line)]


COMMANDS = {f"{page.relative_to(ROOT)} {number}": line for page in PAGES for number, line in enumerate(commands(page))}


def words_of(line: str) -> list[str]:
    """Return a command's words, without what stands for more of them."""
    line = line.replace("...", "").replace("<the run's flags>", "").replace("[", "").replace("]", "")
    # A variable that holds the command ends in a quote, and the head of a line in a backslash.
    return [word for word in shlex.split(line.rstrip('"\\ '), comments=True) if not word.startswith("$")]


def unknown_flags(module: str, given: list[str]) -> list[str]:
    """Return the flags that a module does not take."""
    flags = [word.partition("=")[0] for word in given if word.startswith("--")]
    if module in ENTRIES:
        known = {option for action in training_parser()._actions for option in action.option_strings}
        known |= {*OF_ENTRIES, *(OF_EVALUATE if module.endswith("evaluate") else ())}
        if module.endswith("generate"):
            generation = argparse.ArgumentParser()
            add_generation_arguments(generation)
            known |= {option for action in generation._actions for option in action.option_strings}
        return [flag for flag in flags if flag not in known]
    if module in PARSERS:
        parser = PARSERS[module]()
        subparsers = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        if subparsers:
            parser = subparsers[0].choices[given[0]]
        actions = [*parser._actions, *(training_parser()._actions if module in TAKE_BOTH else ())]
        known = {option for action in actions for option in action.option_strings}
        return [flag for flag in flags if flag not in known]
    # A module without a parser to ask: its flags stand in its text.
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    origin = Path(spec.origin)
    files = origin.parent.glob("*.py") if origin.stem == "__init__" else [origin]
    text = "".join(path.read_text() for path in files)
    known = every_flag() if module in TAKE_BOTH else set()
    return [flag for flag in flags if f'"{flag}"' not in text and flag not in known]


def test_the_pages_show_many_commands() -> None:
    assert len(COMMANDS) >= 35


@pytest.mark.parametrize("name", COMMANDS)
def test_a_documented_command_can_be_typed(name: str) -> None:
    line = COMMANDS[name]
    if line.startswith("make "):
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        wanted = [word for word in shlex.split(line, comments=True)[1:] if "=" not in word]
        assert [word for word in wanted if word not in targets] == []
        return
    match = re.search(r"-m ((?:megatron_csbp|benchmarks)[.\w]*)", line)
    assert match is not None
    module = match.group(1)
    assert importlib.util.find_spec(module) is not None
    assert unknown_flags(module, words_of(line[match.end() :])) == []
    launcher = [word for word in line[: match.start()].split() if word.startswith("--")]
    assert [flag for flag in launcher if flag not in OF_TORCHRUN] == []


# Of docker, make's tools, pip, sbatch and srun; and of Megatron versions that the page is about.
OF_OTHERS = {
    "--no-deps",
    "--hypothesis-profile",
    "--nproc-per-node",
    "--nnodes",
    "--rdzv-endpoint",
    "--max-restarts",
    "--help",
}


@functools.cache
def every_flag() -> set[str]:
    """Return the flags that Megatron, this package and what make runs take, and those that a run is refused."""
    known = {option for action in training_parser()._actions for option in action.option_strings}
    folders = [ROOT / "megatron_csbp", ROOT / "benchmarks", ROOT / "examples", ROOT / "docs"]
    of_make = re.findall(r"-m (tests[.\w]+)", (ROOT / "Makefile").read_text())
    tools = [ROOT / f"{module.replace('.', '/')}.py" for module in of_make]
    for path in [*tools, *(path for folder in folders for path in folder.rglob("*.py"))]:
        known |= set(re.findall(r"""["'](--[a-z][a-z0-9-]*)["']""", path.read_text()))
    known |= set(re.findall(r"--[a-z][a-z0-9-]*", (ROOT / "examples/slurm/pretrain.sbatch").read_text()))
    return known | OF_OTHERS | {feature.flag for feature in UNSUPPORTED}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_that_a_page_names_exist(page: Path) -> None:
    codes = re.findall(r"`([^`\n]+)`", page.read_text())
    named = {flag for code in codes for flag in re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", code)}
    assert sorted(named - every_flag()) == []
