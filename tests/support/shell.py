# SPDX-License-Identifier: Apache-2.0
"""Runs commands of a page as a reader would: in a shell, with this environment's programs and the package as it is."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.megatron_run import ROOT, TIMEOUT_SECONDS, environment


def run_commands(commands: str, folder: Path) -> str:
    """Run a shell script that ends at its first failure, and return what it prints.

    Args:
        commands: the script.
        folder: where it runs.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run = subprocess.run(
        ["bash", "-ec", commands],
        cwd=folder,
        env=environment() | {"PATH": path, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-5000:]
    return run.stdout
