# SPDX-License-Identifier: Apache-2.0
"""The quickstart of the README runs as it is printed, but for the installation of what runs it."""

import re
from pathlib import Path

import pytest

from tests.support.megatron_run import ROOT
from tests.support.shell import run_commands


@pytest.fixture(scope="module")
def blocks() -> list[str]:
    section = (ROOT / "README.md").read_text().partition("## Quickstart")[2].partition("\n## ")[0]
    return re.findall(r"```bash\n(.*?)```", section, flags=re.DOTALL)


def test_the_installation_is_of_the_tested_set(blocks: list[str]) -> None:
    assert blocks[0] == "python3.12 -m venv .venv && . .venv/bin/activate && pip install -c constraints.txt .\n"


def test_it_trains_resumes_and_evaluates_as_printed(blocks: list[str], tmp_path: Path) -> None:
    _, commands = blocks
    output = run_commands(commands, tmp_path)
    assert re.findall(r"iteration +(\d+)/ +\d+ \|", output) == ["1", "10", "20", "21", "30", "40"]
    losses = [float(loss) for loss in re.findall(r"\| lm loss: (\S+) \|", output)]
    assert losses[-1] < losses[0] - 0.3
    # After 20 and 40 iterations, at the end of both runs, and by the evaluation.
    *training, evaluated = [float(value) for value in re.findall(r"nelbo value: (\S+) \|", output)]
    assert len(training) >= 2
    assert evaluated == pytest.approx(training[-1], rel=2e-6)
