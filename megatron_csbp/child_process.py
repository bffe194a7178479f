# SPDX-License-Identifier: Apache-2.0
"""Python code in a process of its own: what it imports or how it ends is nothing of this process."""

import os
import subprocess
import sys
from dataclasses import dataclass

_TIMEOUT_S = 600.0
_OWN_ERROR = ": error: "


@dataclass(frozen=True)
class Ended:
    """A process that has ended.

    Attributes:
        succeeded: whether its status was 0.
        output: its standard output.
        error: the error of an entry of this package, or the last line of its standard error, or the signal that ended
            it.
    """

    succeeded: bool
    output: str
    error: str

    @property
    def refusal(self) -> str:
        """What an entry of this package says is wrong, without the program and the rank before it."""
        return self.error.partition(_OWN_ERROR)[2] or self.error


def run_python(*arguments: str, **environ: str) -> Ended:
    """Run the interpreter of this process.

    Args:
        *arguments: its command line: `-c CODE`, or `-m MODULE ...`.
        **environ: variables to set beside those of this process.
    """
    try:
        run = subprocess.run(
            [sys.executable, *arguments],
            # torchrun reads that file as the end of a rank, and a check that fails in a child is none.
            env=os.environ | {"TORCHELASTIC_ERROR_FILE": ""} | environ,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Ended(False, "", f"did not end within {_TIMEOUT_S:.0f} s")
    if run.returncode < 0:
        return Ended(False, run.stdout, f"ended by signal {-run.returncode}")
    lines = [line.strip() for line in run.stderr.splitlines() if line.strip()] or [f"status {run.returncode}"]
    said = next((line for line in lines[::-1] if _OWN_ERROR in line), lines[-1])
    return Ended(run.returncode == 0, run.stdout, said)


def import_error(module: str) -> str | None:
    """Return why a module cannot be imported; None if it can."""
    ended = run_python("-W", "ignore", "-c", f"import {module}")
    return None if ended.succeeded else ended.error
