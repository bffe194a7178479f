# SPDX-License-Identifier: Apache-2.0
"""The quickstart of the README runs as it is printed, but for the installation of what runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.megatron_run import ROOT, TIMEOUT_SECONDS, environment


@pytest.fixture(scope="module")
def blocks() -> list[str]:
    section = (ROOT / "README.md").read_text().partition("## Quickstart")[2].partition("\n## ")[0]
    return re.findall(r"```bash\n(.*?)```", section, flags=re.DOTALL)


def test_the_installation_is_of_the_tested_set(blocks: list[str]) -> None:
    assert blocks[0] == "python3.12 -m venv .venv && . .venv/bin/activate && pip install -c constraints.txt .\n"


def test_it_trains_resumes_and_evaluates_as_printed(blocks: list[str], tmp_path: Path) -> None:
    _, commands = blocks
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run = subprocess.run(
        ["bash", "-ec", commands],
        cwd=tmp_path,
        env=environment() | {"PATH": path, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-5000:]
    assert re.findall(r"iteration +(\d+)/ +\d+ \|", run.stdout) == ["1", "10", "20", "21", "30", "40"]
    losses = [float(loss) for loss in re.findall(r"\| lm loss: (\S+) \|", run.stdout)]
    assert losses[-1] < losses[0] - 0.3
    # After 20 and 40 iterations, at the end of both runs, and by the evaluation.
    *training, evaluated = [float(value) for value in re.findall(r"nelbo value: (\S+) \|", run.stdout)]
    assert len(training) >= 2
    assert evaluated == pytest.approx(training[-1], rel=2e-6)
