# SPDX-License-Identifier: Apache-2.0
"""Whole training runs for tests: by forked ranks, which is quick, or by torchrun itself."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 600.0
Entry = Literal["pretrain_gpt", "launch", "plain"]


@dataclass(frozen=True)
class Finished:
    """A run that has ended.

    Attributes:
        returncodes: exit status by rank; of torchrun, its own alone.
        output: what all ranks printed, one after the other.
        records: what `tests.support.recorded_entry` noted.
        ended: seconds from the start at which each rank ended.
        timed_out: whether it was killed for its time.
    """

    returncodes: list[int]
    output: str
    records: list[dict[str, Any]]
    ended: list[float]
    timed_out: bool

    def check(self) -> "Finished":
        """Fail with the end of the output unless every rank returned 0."""
        assert not any(self.returncodes), f"exit status {self.returncodes}, timed out: {self.timed_out}\n{self.tail}"
        return self

    @property
    def tail(self) -> str:
        """The last 50 lines of the output."""
        return "\n".join(self.output.splitlines()[-50:])

    def losses(self, name: str = "lm loss") -> list[float]:
        """Return a reported training loss by iteration."""
        return [record["losses"][name] for record in self.records if record["kind"] == "train"]

    @property
    def grad_norms(self) -> list[float]:
        """Gradient norms by iteration."""
        return [record["grad_norm"] for record in self.records if record["kind"] == "train"]

    def evaluated(self, name: str) -> list[float]:
        """Return a reported loss by evaluation."""
        return [record["losses"][name] for record in self.records if record["kind"] == "evaluate"]


class Ranks:
    """Client of `tests.support.rank_server`: runs functions, and training entries, on forked ranks."""

    def __init__(self, folder: Path, server: str = "tests.support.rank_server") -> None:
        self._folder = folder
        self._runs = 0
        command = [sys.executable, "-m", server]
        self._log = (folder / "server.log").open("w")
        self._server = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._answer()

    def close(self) -> None:
        """End the server."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(timeout=30)
        self._log.close()

    def call(self, target: str, argument: Any, world_size: int = 1, timeout: float = TIMEOUT_SECONDS) -> Finished:
        """Run `module:function(argument)` on every rank of a new world.

        Args:
            target: the function; it finds its rank in the environment, as under torchrun.
            argument: anything that JSON can say.
            world_size: ranks.
            timeout: seconds.
        """
        folder = self._new_folder()
        request = {
            "target": target,
            "argument": argument,
            "world_size": world_size,
            "folder": str(folder),
            "timeout": timeout,
        }
        assert self._server.stdin is not None
        print(json.dumps(request), file=self._server.stdin, flush=True)
        answer = self._answer()
        output = "\n".join((folder / f"rank{rank}.log").read_text(errors="replace") for rank in range(world_size))
        return Finished(answer["returncodes"], output, [], answer["ended"], answer["timed_out"])

    def train(
        self,
        arguments: Sequence[str],
        world_size: int = 1,
        *,
        entry: Entry = "pretrain_gpt",
        hooks: Sequence[str] = (),
        timeout: float = TIMEOUT_SECONDS,
    ) -> Finished:
        """Run a training entry on every rank of a new world; see `tests.support.recorded_entry`."""
        records = self._new_folder() / "records.jsonl"
        request = {"entry": entry, "arguments": list(arguments), "records": str(records), "hooks": list(hooks)}
        run = self.call("tests.support.recorded_entry:run", request, world_size, timeout)
        return Finished(run.returncodes, run.output, read_records(records), run.ended, run.timed_out)

    def _answer(self) -> Any:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        assert line, f"the rank server ended: {(self._folder / 'server.log').read_text()[-3000:]}"
        return json.loads(line)

    def _new_folder(self) -> Path:
        self._runs += 1
        folder = self._folder / f"run{self._runs}"
        folder.mkdir()
        return folder


def torchrun(arguments: Sequence[str], world_size: int, timeout: float = TIMEOUT_SECONDS) -> Finished:
    """Run `torchrun --nproc-per-node WORLD_SIZE ARGUMENTS`.

    Args:
        arguments: for example `["-m", "megatron_csbp.pretrain_gpt", ...]`.
        world_size: ranks.
        timeout: seconds.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    command += arguments
    started = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    timed_out = False
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        timed_out = True
        process.terminate()  # torchrun then ends its ranks
        output, _ = process.communicate()
    return Finished([process.returncode], output, [], [time.monotonic() - started], timed_out)


def worst_difference(found: list[float], expected: list[float]) -> float:
    """Return the largest relative difference of two curves of equal length."""
    assert len(found) == len(expected) > 0
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read what a run noted; nothing if it ended before it could note anything."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def environment() -> dict[str, str]:
    """One thread for each rank: the machine's processors are shared between the ranks."""
    return os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
