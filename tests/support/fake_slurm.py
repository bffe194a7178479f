# SPDX-License-Identifier: Apache-2.0
"""A stand-in for SLURM: `sbatch`, `srun`, `scontrol` and `scancel` that start real processes on this machine.

`install` writes the four commands into a folder for PATH; each runs this module. Nodes are names only, unless
FAKE_SLURM_NAMESPACES lists network namespaces: tasks of node i then run in the i-th. What a real SLURM does and the
job script relies on is kept: unknown options are errors, a signal with `B:` goes to the script alone, `scancel
--signal` to every process of the steps and not to the script, and a job that asked to be requeued starts again with a
higher SLURM_RESTART_COUNT.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMANDS = ("sbatch", "srun", "scontrol", "scancel")
JOB = "4242"


def install(folder: Path, *, nodes: Sequence[str], namespaces: Sequence[str] = ()) -> dict[str, str]:
    """Write the commands; return the environment in which they are found.

    Args:
        folder: an empty folder.
        nodes: what `scontrol show hostnames` says.
        namespaces: network namespaces of the nodes.
    """
    for name in COMMANDS:
        command = folder / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "{__file__}" {name} "$@"\n')
        command.chmod(0o755)
    state = folder / "state"
    state.mkdir()
    return os.environ | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "FAKE_SLURM_STATE": str(state),
        "FAKE_SLURM_NODES": " ".join(nodes),
        "FAKE_SLURM_NAMESPACES": " ".join(namespaces),
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
    }


def state() -> Path:
    return Path(os.environ["FAKE_SLURM_STATE"])


def sbatch(words: Sequence[str]) -> int:
    """Run a job to its end, requeues and all; FAKE_SLURM_WARN "GLOB TEXT" is when its time runs out, once."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for option in ("job-name", "output", "open-mode", "time", "gpus-per-node", "signal", "array"):
        parser.add_argument(f"--{option}")
    for option, least in (("nodes", 1), ("ntasks-per-node", 1), ("cpus-per-task", 1)):
        parser.add_argument(f"--{option}", type=int, default=least)
    for option in ("exclusive", "requeue"):
        parser.add_argument(f"--{option}", action="store_true")
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    script = next(Path(word) for word in words if word.endswith(".sbatch"))
    lines = re.findall(r"^#SBATCH (.*)$", script.read_text(), flags=re.MULTILINE)
    args = parser.parse_args([*" ".join(lines).split(), *words])
    array = range(1, 1 + int(re.fullmatch(r"1-(\d+)%1", args.array)[1])) if args.array else [0]  # type: ignore[index]
    status = 0
    for task in array:
        for restart in range(20):
            status = _run_job(args, int(JOB) + task, task, restart)
            requeued = state() / "requeued"
            if not requeued.exists():
                break
            assert args.requeue, "a job without --requeue cannot be requeued"
            requeued.unlink()
    return status


def _run_job(args: argparse.Namespace, job: int, task: int, restart: int) -> int:
    environ = os.environ | {
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_NODELIST": "node[0-9]",
        "SLURM_NNODES": str(args.nodes),
        "SLURM_NTASKS_PER_NODE": str(args.ntasks_per_node),
        "SLURM_CPUS_PER_TASK": str(args.cpus_per_task),
    }
    if restart:
        environ["SLURM_RESTART_COUNT"] = str(restart)
    if task:
        environ["SLURM_ARRAY_JOB_ID"] = JOB
    with Path(args.output.replace("%j", str(job))).open("a") as log:
        batch = subprocess.Popen(["bash", str(args.script), *args.arguments], env=environ, stdout=log, stderr=log)
        warned = state() / "warned"
        while batch.poll() is None:
            if not warned.exists() and _is_time(os.environ.get("FAKE_SLURM_WARN")):
                to_script, _, rest = args.signal.partition(":")
                assert to_script == "B"
                warned.touch()
                batch.send_signal(getattr(signal, f"SIG{rest.partition('@')[0]}"))
            time.sleep(0.02)
    return batch.returncode


def _is_time(when: str | None) -> bool:
    if not when:
        return False
    pattern, _, text = when.partition(" ")
    return any(text in path.read_text(errors="replace") for path in Path().glob(pattern))


def srun(words: Sequence[str]) -> int:
    """Start the tasks of a step, and wait for them."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for option in ("nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "kill-on-bad-exit"):
        parser.add_argument(f"--{option}", type=int)
    for option in ("output", "container-image", "container-mounts", "container-workdir"):
        parser.add_argument(f"--{option}")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args(words)
    assert args.ntasks == args.nodes * args.ntasks_per_node
    namespaces = os.environ["FAKE_SLURM_NAMESPACES"].split()
    tasks = {}
    for task in range(args.ntasks):
        node, local = divmod(task, args.ntasks_per_node)
        environ = os.environ | {
            "SLURM_PROCID": str(task),
            "SLURM_LOCALID": str(local),
            "SLURM_NODEID": str(node),
            "SLURM_NTASKS": str(args.ntasks),
        }
        prefix = ["ip", "netns", "exec", namespaces[node]] if namespaces else []
        with _output(args.output, task) as out:
            tasks[task] = subprocess.Popen(
                [*prefix, *args.command], env=environ, stdout=out, stderr=out, start_new_session=True
            )
    running = state() / f"step-{os.getpid()}"
    running.write_text(json.dumps([process.pid for process in tasks.values()]))
    status = 0
    while tasks:
        for task, process in list(tasks.items()):
            if process.poll() is not None:
                del tasks[task]
                status = status or abs(process.returncode)
                if process.returncode and args.kill_on_bad_exit:
                    for other in tasks.values():
                        _signal(other.pid, signal.SIGKILL)
        time.sleep(0.02)
    running.unlink()
    return status


@contextlib.contextmanager
def _output(pattern: str | None, task: int) -> Iterator[int | None]:
    if pattern is None:
        yield None
        return
    with Path(pattern.replace("%t", str(task))).open("w") as file:
        yield file.fileno()


def scontrol(words: Sequence[str]) -> int:
    """Name the nodes, or put the job back into the queue."""
    if list(words[:2]) == ["show", "hostnames"]:
        print("\n".join(os.environ["FAKE_SLURM_NODES"].split()))
    else:
        assert words[0] == "requeue"
        (state() / "requeued").touch()
    return 0


def scancel(words: Sequence[str]) -> int:
    """Signal every process of the job's steps."""
    name = words[0].removeprefix("--signal=")
    for step in state().glob("step-*"):
        for process in json.loads(step.read_text()):
            _signal(process, getattr(signal, f"SIG{name}"))
    return 0


def _signal(session: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, number)


if __name__ == "__main__":
    sys.exit({"sbatch": sbatch, "srun": srun, "scontrol": scontrol, "scancel": scancel}[sys.argv[1]](sys.argv[2:]))
