# SPDX-License-Identifier: Apache-2.0
"""An entry that only counts, with the flags and the signals of the real one: for tests of the job script.

Ranks wait for each other in every iteration, through files in the working directory, and agree on when to stop.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
ASKED: list[int] = []


def main() -> None:
    """Count to --train-iters, from where the checkpoint of --load ends; save and end on SIGTERM."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--load", type=Path)
    parser.add_argument("--train-iters", type=int, required=True)
    parser.add_argument("--fail-at", type=int)
    parser.add_argument("--exit-signal-handler", action="store_true")
    args = parser.parse_args()
    assert args.exit_signal_handler
    assert args.save is None or args.load == args.save
    signal.signal(signal.SIGTERM, lambda number, frame: ASKED.append(number))
    done = int((args.load / TRACKER).read_text()) if args.load and (args.load / TRACKER).exists() else 0
    if done >= args.train_iters:
        sys.exit("error: nothing is left to train")
    rank = os.environ["RANK"]
    for iteration in range(done + 1, args.train_iters + 1):
        time.sleep(0.02)
        if iteration == args.fail_at and rank == "1" and done == 0:
            sys.exit("error: rank 1 fails")
        stops = all_ranks_say(iteration, "stop" if ASKED else "go on")
        print(f"iteration {iteration} of {os.environ['WORLD_SIZE']} ranks at {os.environ['MASTER_ADDR']}", flush=True)
        if args.save and rank == "0":
            args.save.mkdir(exist_ok=True)
            (args.save / TRACKER).write_text(str(iteration))
        if "stop" in stops:
            print("exiting program after receiving SIGTERM.")
            return


def all_ranks_say(iteration: int, word: str) -> list[str]:
    """Wait until every rank has come to an iteration, and return what each says there."""
    start = f"{os.environ['SLURM_JOB_ID']}.{os.environ.get('SLURM_RESTART_COUNT', 0)}.{iteration}"
    files = [Path(f".said.{start}.{rank}") for rank in range(int(os.environ["WORLD_SIZE"]))]
    mine = files[int(os.environ["RANK"])]
    new = Path(f"{mine}.new")
    new.write_text(word)
    new.rename(mine)
    while not all(file.exists() for file in files):
        time.sleep(0.005)
    return [file.read_text() for file in files]


if __name__ == "__main__":
    main()
