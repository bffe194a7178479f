# SPDX-License-Identifier: Apache-2.0
"""How a user's mistake is shown: one line, not a traceback, and the last thing that torchrun says."""

import contextlib
import difflib
import json
import os
import sys
import time
import traceback
import warnings
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
# Megatron warns of the same optional packages in every module and on every rank; the start summary says it once.
_OPTIONAL_PACKAGES = r"(?is).*(apex|transformer.engine|multi_tensor)"
_UNKNOWN = "unrecognized arguments: "


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
            "torchrun --nproc-per-node 1 -m megatron_csbp.pretrain_gpt ..., or check it with --csbp-dry-run RANKS"
        )


def say_errors_in_one_line(parser: ArgumentParser) -> None:
    """Let a parser raise a ValueError for a flag it refuses, instead of printing all of Megatron's usage on each rank.

    Args:
        parser: changed in place. An unknown flag is shown with the known ones that are spelled like it.
    """

    def error(message: str) -> NoReturn:
        if not message.startswith(_UNKNOWN):
            raise ValueError(message)
        unknown = [word for word in message.removeprefix(_UNKNOWN).split() if word.startswith("--")]
        known = [flag for action in parser._actions for flag in action.option_strings]
        similar = [match for flag in unknown for match in difflib.get_close_matches(flag.split("=")[0], known, n=2)]
        hint = f" (did you mean {' or '.join(similar)}?)" if similar else ""
        raise ValueError(f"{message}{hint}; --help lists every flag.")

    parser.error = error  # type: ignore[method-assign]


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn a ValueError into its message on standard error and exit status 2.

    Every rank checks the same arguments, so all of them stop here with the same message, before any collective. Under
    torchrun the first rank of a node prints it; all leave it in the file out of which torchrun makes its last lines.
    """
    try:
        yield
    except ValueError as error:
        rank = os.environ.get("RANK")
        speaker = "megatron_csbp" if rank is None else f"megatron_csbp: rank {rank}"
        line = f"{speaker}: error: {error}"
        is_left_to_torchrun = _leave_to_torchrun(line)
        if not is_left_to_torchrun or os.environ.get("LOCAL_RANK", "0") == "0":
            print(line, file=sys.stderr, flush=True)
        raise SystemExit(2) from error


def _leave_to_torchrun(line: str) -> bool:
    """Write a message into torchrun's error file; return whether there is one."""
    file = os.environ.get(_ERROR_FILE)
    if not file:
        return False
    try:
        Path(file).write_text(json.dumps({"message": line, "timestamp": str(int(time.time()))}))
    except OSError:
        return False
    return True


def hush_optional_packages() -> None:
    """Leave out Megatron's warnings of packages that it does without, on every rank and from every module."""
    warnings.filterwarnings("ignore", message=_OPTIONAL_PACKAGES, category=UserWarning, module=r"megatron\.")


@contextlib.contextmanager
def failure_in_words(what: str) -> Iterator[None]:
    """Turn a failed check of Megatron's, often an assertion without a message, into a ValueError that shows it.

    Args:
        what: what Megatron was doing.
    """
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, TypeError) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        said = f": {error}" if str(error) else ""
        raise ValueError(
            f"Megatron's {what} failed{said} [{type(error).__name__} at `{frame.line}`, "
            f"{Path(frame.filename).name}:{frame.lineno}]"
        ) from error
