# SPDX-License-Identifier: Apache-2.0
"""`--csbp-dry-run RANKS`: would this command line start on so many ranks? Every check of a start, and nothing else.

One process stands in for all: no launcher, no GPU, no process group, no folder made. What only a rank can know is not
checked: its device, its kernels, and the shapes of weights in a checkpoint (their network is).
"""

import argparse
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

FLAG = "--csbp-dry-run"


def add_check_mode_argument(parser: ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the flag, which the entries read before Megatron is imported."""
    parser.add_argument(
        FLAG,
        type=int,
        default=None,
        metavar="RANKS",
        help="Check this command line as a job of RANKS ranks would at its start, in one process without a launcher "
        "and without a GPU, print the summary and stop. Status 0 if the job would start. (No flag of Megatron's.)",
    )


def stand_in_for_launcher(argv: Sequence[str]) -> bool:
    """Set what torchrun would set for the first of many ranks, if a command line asks for a dry run.

    Args:
        argv: the command line without the program.

    Returns:
        Whether it asks.

    Raises:
        ValueError: the number of ranks is none.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(FLAG, default=None)
    ranks = vars(parser.parse_known_args([word for word in argv if word not in ("-h", "--help")])[0])["csbp_dry_run"]
    if ranks is None:
        return False
    if not ranks.isdigit() or int(ranks) < 1:
        raise ValueError(f"{FLAG} {ranks} must be the number of ranks of the job, at least 1; for example {FLAG} 16.")
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": ranks}
    return True


def leave_reporting_out(args: Namespace) -> None:
    """Keep a dry run from opening what a run reports to; nothing changes in a run that is none."""
    if args.csbp_dry_run is not None:
        args.tensorboard_dir = None
        args.wandb_project = ""


def leave_data_open(parser: ArgumentParser) -> None:
    """Mark a command line whose data and tokenizer stand in for others that it does not name yet."""
    parser.set_defaults(csbp_data_left_open=True)


def leaves_data_open(args: Namespace) -> bool:
    """Return whether data and tokenizer are stand-ins, of which no token needs to be checked."""
    return getattr(args, "csbp_data_left_open", False)


def end(args: Namespace) -> None:
    """Say that all checks have passed and stop, if this is a dry run.

    Raises:
        SystemExit: with status 0.
    """
    if args.csbp_dry_run is not None:
        print(f"megatron_csbp: dry run: every check passed; this job would start on {args.world_size} rank(s)")
        raise SystemExit(0)
