# SPDX-License-Identifier: Apache-2.0
"""Forks ranks of distributed runs from a process that has imported Megatron already.

Importing PyTorch and Megatron costs a rank several seconds of processor time; a fork of it costs nothing. The server
reads one JSON request a line from standard input, runs it, and answers with one JSON line. Each rank is a process of
its own with the environment that torchrun would give it. `tests.support.megatron_run` is the client.
"""

import contextlib
import importlib
import json
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

import torch

GRACE_SECONDS = 15.0
"""How long the others may take to end by themselves once one rank has failed, before they are killed."""


def import_everything() -> None:
    """Import what every rank needs; the CPU runtime has to come before Megatron."""
    from megatron_csbp import cpu_runtime

    cpu_runtime.install("cpu")
    for name in ("autoregressive", "training_setup", "launch", "pretrain_gpt"):
        importlib.import_module(f"megatron_csbp.{name}")
    # The last two are imported late in a run, and each takes more than a second.
    for name in ("megatron.training.training", "megatron.core.tokenizers.text", "torch._dynamo"):
        importlib.import_module(name)
    read_help_once()
    assert threading.active_count() == 1, "a fork would leave other threads behind"


def read_help_once() -> None:
    """Keep the help of Megatron's flags, which each parser reads from the source: half of the start of a rank."""
    from megatron.training.argument_utils import ArgumentGroupFactory

    from megatron_csbp import megatron_arguments

    read, known = ArgumentGroupFactory._get_field_docstrings, {}

    def keep(factory: Any, config_class: type) -> dict[str, str]:
        if config_class not in known:
            known[config_class] = read(factory, config_class)
        return known[config_class]

    ArgumentGroupFactory._get_field_docstrings = keep
    megatron_arguments.argument_parser()


def free_port() -> int:
    """Return a port that nobody listens on, and that the system gives to no connection before a rank listens on it.

    Gloo opens many connections, each on a port of the system's choice, so a port of that range is soon taken.
    """
    while True:
        port = random.randrange(15_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def run_rank(request: dict[str, Any], rank: int, port: int) -> None:
    """Be one rank: call the target and leave, with the status that a Python program would leave with."""
    os.setpgid(0, 0)  # data workers and checkpoint writers are then killed with their rank
    log = os.open(Path(request["folder"]) / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    size = request["world_size"]
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"})
    module, function = request["target"].split(":")
    status = 0
    try:
        getattr(importlib.import_module(module), function)(request["argument"])
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """Run one request to its end.

    Args:
        request: `target` ("module:function"), its JSON `argument`, `world_size`, `folder` for logs, `timeout` in
            seconds.

    Returns:
        `returncodes` by rank (negative: killed by that signal), `ended`: seconds from the start at which each rank
        ended, `timed_out`.
    """
    port, started = free_port(), time.monotonic()
    ranks: dict[int, int] = {}
    for rank in range(request["world_size"]):
        process = os.fork()
        if process == 0:
            run_rank(request, rank, port)
        ranks[process] = rank
    processes = dict(ranks)
    codes: dict[int, int] = {}
    ended: dict[int, float] = {}
    deadline = started + request["timeout"]
    timed_out = False
    try:
        while ranks:
            process, status = os.waitpid(-1, os.WNOHANG)
            now = time.monotonic()
            if process in ranks:
                rank = ranks.pop(process)
                codes[rank], ended[rank] = os.waitstatus_to_exitcode(status), now - started
                if codes[rank] != 0:
                    deadline = min(deadline, now + GRACE_SECONDS)
            elif now > deadline:
                timed_out = timed_out or now > started + request["timeout"]
                kill(ranks)
                deadline = float("inf")
            else:
                time.sleep(0.01)
    finally:
        kill(processes)  # also of ranks that have ended: their checkpoint writers outlive an os._exit
    size = range(request["world_size"])
    return {"returncodes": [codes[r] for r in size], "ended": [ended[r] for r in size], "timed_out": timed_out}


def kill(processes: dict[int, int]) -> None:
    for process in processes:
        for stop in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                stop(process, signal.SIGKILL)


def main() -> None:
    """Serve until standard input closes."""
    answers: TextIO = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever an import prints must not look like an answer
    torch.set_num_threads(1)
    import_everything()
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
