# SPDX-License-Identifier: Apache-2.0
"""How a user's mistake is shown: one line a rank, not a traceback."""

import contextlib
import os
import sys
from collections.abc import Iterator


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
