# SPDX-License-Identifier: Apache-2.0
"""A command of the package on a forked rank, for `tests.support.rank_server`."""

import importlib
import sys
from typing import Any


def run(request: dict[str, Any]) -> None:
    """Call `main` of `request["module"]` with `request["arguments"]` as the command line."""
    sys.argv = [request["module"], *request["arguments"]]
    importlib.import_module(request["module"]).main()
