# SPDX-License-Identifier: Apache-2.0
"""Runs the real entry under torchrun, and turns its log into a few lines of progress and a record."""

import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_ITERATION = re.compile(r"iteration\s+(\d+)/\s*\d+ \|.*?lm loss: (\S+) \|.*?grad norm: (\S+) \|")
_EVALUATION = re.compile(r"validation\S* loss at iteration (\d+)(.*)")
_EVALUATED = re.compile(r"\| ([a-z ]+) value: (\S+)")
_OWN_ERROR = re.compile(r"megatron_csbp: (rank \d+: )?error: ")
_TORCHRUN = "torch/distributed/elastic/"
_SAID_SECONDS = 6.0
_MEAN_OF = 10
_TAIL_LINES = 30
_CALM_ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    # All ranks are on this machine, whatever its host name resolves to.
    "GLOO_SOCKET_IFNAME": "lo",
}


class DemoError(Exception):
    """Something went wrong; the message is for the user."""


@dataclass
class RunRecord:
    """What the log of one run says.

    Attributes:
        losses: `lm loss` by iteration, with all the digits that Megatron logs.
        grad_norms: `grad norm` by iteration.
        validation: by iteration, in nats for each token: the NELBO, or the next-token loss of an autoregressive run.
        traffic: the start summary's line about attention traffic.
        seconds: wall-clock time of the whole run.
    """

    losses: dict[int, float] = field(default_factory=dict)
    grad_norms: dict[int, float] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)
    traffic: str = ""
    seconds: float = 0.0

    def read(self, line: str) -> bool:
        """Take in one line of the log; return whether it is an iteration or an evaluation."""
        if match := _ITERATION.search(line):
            self.losses[int(match[1])] = float(match[2])
            self.grad_norms[int(match[1])] = float(match[3])
        elif match := _EVALUATION.search(line):
            losses = {name: float(value) for name, value in _EVALUATED.findall(match[2])}
            self.validation[int(match[1])] = losses.get("nelbo", losses["lm loss"])
        elif "attention traffic per layer" in line:
            self.traffic = line.strip()
            return False
        else:
            return False
        return True

    def recent_loss(self) -> float:
        """Return the mean loss of the last few iterations."""
        recent = [self.losses[iteration] for iteration in sorted(self.losses)[-_MEAN_OF:]]
        return sum(recent) / len(recent)


def torchrun_command(arguments: Sequence[str], num_ranks: int) -> list[str]:
    """Return the command that trains on `num_ranks` ranks of this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    address = ["--master-addr", "127.0.0.1", "--master-port", str(_free_port())]
    return [*launcher, *address, "-m", "megatron_csbp.pretrain_gpt", *arguments]


def train(
    name: str, arguments: Sequence[str], num_iterations: int, num_ranks: int, threads: int, log: Path
) -> RunRecord:
    """Run a training to its end, showing its progress.

    Args:
        name: what to call it.
        arguments: of `megatron_csbp.pretrain_gpt`.
        num_iterations: how many iterations the run will do.
        num_ranks: ranks on this machine.
        threads: CPU threads of each rank.
        log: file for the whole output.

    Raises:
        DemoError: it failed; the message holds the end of the log.
    """
    command = torchrun_command(arguments, num_ranks)
    log.with_suffix(".sh").write_text(f"OMP_NUM_THREADS={threads} {shlex.join(command)}\n")
    print(f"\n{name}: {num_ranks} rank(s), {threads} thread(s) each; log: {log}", flush=True)
    record, progress, started = RunRecord(), _Progress(num_iterations), time.monotonic()
    for line in _run_logged(command, log, {"OMP_NUM_THREADS": str(threads)}):
        if record.read(line):
            progress.show(record)
    record.seconds = time.monotonic() - started
    if not record.losses:
        raise DemoError(f"{name} ended without a single iteration in its log.\n{_tail(log)}")
    return record


def run_command(command: Sequence[str], threads: int, log: Path) -> str:
    """Run a command to its end; return its standard output.

    Args:
        command: words.
        threads: CPU threads.
        log: file for its standard error.

    Raises:
        DemoError: it failed; the message holds the end of the log.
    """
    log.with_suffix(".sh").write_text(f"OMP_NUM_THREADS={threads} {shlex.join(command)}\n")
    variables = os.environ | _CALM_ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)}
    with log.open("w") as file:
        run = subprocess.run(command, stdout=subprocess.PIPE, stderr=file, text=True, env=variables, check=False)
    if run.returncode:
        raise DemoError(f"{log.with_suffix('.sh')} failed with exit status {run.returncode}.\n{_tail(log)}")
    return run.stdout


@dataclass
class _Progress:
    """Shows a run: an iteration every few seconds, and each evaluation."""

    num_iterations: int
    evaluations: int = 0
    first_ended: float = 0.0
    said: float = 0.0

    def show(self, record: RunRecord) -> None:
        """Say what is new in a record."""
        now, iteration = time.monotonic(), max(record.losses, default=0)
        if len(record.validation) > self.evaluations:
            self.evaluations = len(record.validation)
            print(f"  validation at iteration {iteration}: {record.validation[iteration]:.4f} nats/token", flush=True)
        elif iteration == 1:
            self.first_ended = now
        elif iteration == self.num_iterations or now - self.said >= _SAID_SECONDS:
            self.said = now
            remaining = (now - self.first_ended) / (iteration - 1) * (self.num_iterations - iteration)
            losses = f"loss {record.losses[iteration]:.6f}, mean of the last {_MEAN_OF} {record.recent_loss():.3f}"
            print(f"  iteration {iteration:3d}/{self.num_iterations}: {losses}, ETA {remaining:.0f} s", flush=True)


def _run_logged(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """Run a command, yielding its output by line and writing it to a file.

    Raises:
        DemoError: it failed; the message holds the end of the log.
    """
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=os.environ | _CALM_ENVIRONMENT | environment,
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                file.write(line)
                yield line
            process.wait()
        finally:
            # Reached early on Ctrl-C or an error here; torchrun then ends its ranks.
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode:
        raise DemoError(f"{log.with_suffix('.sh')} failed with exit status {process.returncode}.\n{_tail(log)}")


def _tail(log: Path) -> str:
    """Return what a log says about a failure: our own message, or the end before torchrun reports on its processes."""
    lines = log.read_text(errors="replace").splitlines()
    for line in lines:
        if _OWN_ERROR.search(line):
            return f"{line}\n(whole log: {log})"
    end = next((number for number, line in enumerate(lines) if _TORCHRUN in line), len(lines))
    return "\n".join([f"The end of {log}:", *(f"  {line}" for line in lines[max(0, end - _TAIL_LINES) : end])])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
