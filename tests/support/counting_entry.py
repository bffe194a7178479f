# SPDX-License-Identifier: Apache-2.0
"""An entry that only counts, with the flags and the signals of the real one: for tests of the job script."""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
LOCK = ".megatron_csbp.lock"


def main() -> None:
    """Count to --train-iters, from where the checkpoint of --load ends; save and end on SIGTERM."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--load", type=Path)
    parser.add_argument("--train-iters", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=0.05)
    parser.add_argument("--fail-at", type=int)
    parser.add_argument("--exit-signal-handler", action="store_true")
    args = parser.parse_args()
    assert args.exit_signal_handler
    assert args.save is None or args.load == args.save
    is_first, asked = os.environ["RANK"] == "0", []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    done = int((args.load / TRACKER).read_text()) if args.load and (args.load / TRACKER).exists() else 0
    if done >= args.train_iters:
        sys.exit("error: nothing is left to train")
    for iteration in range(done + 1, args.train_iters + 1):
        time.sleep(args.seconds)
        print(f"iteration {iteration} of {os.environ['WORLD_SIZE']} ranks at {os.environ['MASTER_ADDR']}", flush=True)
        if args.save and is_first:
            args.save.mkdir(exist_ok=True)
            (args.save / TRACKER).write_text(str(iteration))
        if iteration == args.fail_at and os.environ["RANK"] == "1":
            sys.exit("error: rank 1 fails")
        if asked:
            print("exiting program after receiving SIGTERM.")
            return


if __name__ == "__main__":
    main()
