# SPDX-License-Identifier: Apache-2.0
"""How a user's mistake is shown: one line, not a traceback."""

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn a ValueError into its message on standard error and exit status 2; rank 0 speaks, all ranks exit.

    Every rank checks the same arguments, so all of them stop here, before any collective.
    """
    try:
        yield
    except ValueError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"megatron_csbp: error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from error
