# SPDX-License-Identifier: Apache-2.0
"""How a user's mistake is shown: one line a rank, not a traceback."""

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path


def check_launcher(argv: Sequence[str]) -> None:
    """Check that a launcher has told this process its rank; `--help` needs none.

    Args:
        argv: the command line without the program.

    Raises:
        ValueError: it was started by hand.
    """
    if "RANK" not in os.environ and not {"-h", "--help"} & set(argv):
        raise ValueError(
            "RANK is not set: the process was not started by torchrun. Start it, also for one rank, with "
            "torchrun --nproc-per-node 1 -m megatron_csbp.pretrain_gpt ..."
        )


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn a ValueError into its message on standard error and exit status 2.

    Every rank checks the same arguments, so all of them stop here with the same message, before any collective.
    """
    try:
        yield
    except ValueError as error:
        rank = os.environ.get("RANK")
        speaker = "megatron_csbp" if rank is None else f"megatron_csbp: rank {rank}"
        print(f"{speaker}: error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from error


@contextlib.contextmanager
def failure_in_words(what: str) -> Iterator[None]:
    """Turn a failed check of Megatron's, often an assertion without a message, into a ValueError that shows it.

    Args:
        what: what Megatron was doing.
    """
    try:
        yield
    except (AssertionError, AttributeError, ImportError, TypeError) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        said = f": {error}" if str(error) else ""
        raise ValueError(
            f"Megatron's {what} failed{said} [{type(error).__name__} at `{frame.line}`, "
            f"{Path(frame.filename).name}:{frame.lineno}]"
        ) from error
