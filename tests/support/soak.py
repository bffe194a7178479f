# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.support.soak --iterations 3000`: a long run on two ranks, in which nothing may grow.

With evaluation and checkpoints all the while. Of every iteration each rank notes its resident memory, open files,
threads and processor time, the last also as a multiple of a fixed computation's right after it, since cores slow down
and speed up with what else runs on the machine; afterwards each is compared between an early and a late part of the
run. The share of tokens that noise masked has to be what the schedule says.
"""

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.functional.model_flags import BLOCK_DIFFUSION, CSBP2, TIED, words
from tests.support.megatron_run import Finished, Ranks

WORLD_SIZE = 2
MOST_GROWTH = {"resident MiB": 0.02, "open files": 0.0, "threads": 0.0, "processor time": 0.25}
"""By how much the late part may exceed the early one. Processor time, since wall time is of the machine."""
LEAST_GROWTH = {"resident MiB": 24.0, "open files": 2.0, "threads": 1.0, "processor time": 0.0}
"""What counts as growth at all."""
MASKED = 0.5
"""Of a block whose time is uniform, under the log-linear schedule."""


class Noted(NamedTuple):
    """What a rank noted of one iteration; processor time in milliseconds is not judged."""

    resident_mib: float
    open_files: float
    threads: float
    processor_time: float
    processor_ms: float


def note_resources() -> None:
    """Note, on this rank, what every iteration leaves behind: a hook of `tests.support.recorded_entry`."""
    from megatron.training import training

    folder, step = Path(sys.argv[sys.argv.index("--save") + 1]).parent, training.train_step
    file = (folder / f"rank{os.environ['RANK']}.jsonl").open("a", buffering=1)
    process = psutil.Process()
    before = [time.process_time()]

    @functools.wraps(step)
    def train_step(*positional: Any, **keywords: Any) -> Any:
        result = step(*positional, **keywords)
        seconds = time.process_time() - before[0]
        noted = Noted(
            process.memory_info().rss / 2**20,
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
            seconds / yardstick(),
            1e3 * seconds,
        )
        file.write(json.dumps(noted) + "\n")
        before[0] = time.process_time()
        return result

    training.train_step = train_step


def yardstick() -> float:
    """Return the processor time, in seconds, of a fixed computation of Python and PyTorch: some milliseconds."""
    import torch

    started = time.process_time()
    numbers = torch.ones(128, 128)
    for _ in range(50):
        numbers = (numbers @ numbers).clamp(max=1.0)
        sorted(range(100))
    return time.process_time() - started


def soak(ranks: Ranks, iterations: int, folder: Path) -> tuple[Finished, list[list[Noted]]]:
    """Train, and return the run and what each rank noted."""
    every = min(100, iterations // 5)
    flags = [*TIED, *BLOCK_DIFFUSION, *CSBP2, "--train-iters", str(iterations), "--save", str(folder / "run")]
    flags += words(f"--eval-iters 1 --eval-interval {every} --save-interval {every} --lr-decay-iters {iterations}")
    run = ranks.train(flags, WORLD_SIZE, hooks=["tests.support.soak:note_resources"], timeout=20_000)
    noted = [
        [Noted(*json.loads(line)) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()]
        for rank in range(WORLD_SIZE)
    ]
    return run, noted


def grown(noted: Sequence[Noted]) -> list[str]:
    """Say what is larger in the last fifth of a run than in the second fifth: the first warms up.

    Compared are lower quartiles: growth moves them as it moves the rest, and other work on the machine, which only
    adds, moves them least.
    """
    fifth = len(noted) // 5
    early, late = noted[fifth : 2 * fifth], noted[-fifth:]
    lines = []
    for place, (name, most) in enumerate(MOST_GROWTH.items()):
        before, after = (lower_quartile(part[place] for part in parts) for parts in (early, late))
        if after > before * (1 + most) and after - before > LEAST_GROWTH[name]:
            lines.append(f"{name}: {before:.1f} early, {after:.1f} late")
    return lines


def lower_quartile(values: Iterable[float]) -> float:
    """Return what three quarters of the values exceed."""
    return statistics.quantiles(values, n=4)[0]


def noise_problem(fractions: Sequence[float]) -> str | None:
    """Return why the masked shares of the iterations are not those of the schedule: five standard errors from it."""
    mean = statistics.mean(fractions)
    error = statistics.stdev(fractions) / len(fractions) ** 0.5
    if abs(mean - MASKED) < 5 * error:
        return None
    return f"masked fraction: mean {mean:.4f}, not {MASKED} within 5 x {error:.4f}"


def problems(run: Finished, noted: Sequence[Sequence[Noted]], iterations: int) -> list[str]:
    """Return what a run has shown that it should not."""
    found = [] if not any(run.returncodes) else [f"exit status {run.returncodes}:\n{run.tail}"]
    fractions = run.losses("masked fraction")
    if len(fractions) != iterations:
        return [*found, f"{len(fractions)} iterations of {iterations}"]
    for rank, of_rank in enumerate(noted):
        found += [f"rank {rank}: {line}" for line in grown(of_rank)]
    wrong = noise_problem(fractions)
    return [*found, wrong] if wrong is not None else found


def main() -> int:
    """Run the soak and say what it found."""
    parser = argparse.ArgumentParser(description="A long run in which nothing may grow.")
    parser.add_argument("--iterations", type=int, default=3000)
    iterations = parser.parse_args().iterations
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(Path(folder))
        started = time.monotonic()
        try:
            run, noted = soak(ranks, iterations, Path(folder))
        finally:
            ranks.close()
        found = problems(run, noted, iterations)
        for rank, of_rank in enumerate(noted):
            fifth = len(of_rank) // 5
            parts = [of_rank[:fifth], of_rank[fifth : 2 * fifth], of_rank[-fifth:]]
            for place, name in enumerate([*MOST_GROWTH, "processor ms"]):
                quartiles = [lower_quartile(part[place] for part in noted) for noted in parts]
                print(f"rank {rank}: {name}: first, second and last fifth {', '.join(f'{x:.1f}' for x in quartiles)}")
        fractions = run.losses("masked fraction")
        print(f"masked fraction: mean {statistics.mean(fractions):.4f} over {len(fractions)} iterations")
        print(f"soak: {len(found)} problem(s) in {time.monotonic() - started:.0f} s")
        print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
