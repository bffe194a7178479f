# SPDX-License-Identifier: Apache-2.0
"""`python -m MODULE ARGUMENTS` on forked ranks, where an example would start torchrun."""

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from tests.support.megatron_run import Finished, Ranks


def run_module(ranks: Ranks, command: Sequence[str]) -> Finished:
    """Run what a command would run.

    Args:
        ranks: the server.
        command: `[torchrun words] -m megatron_csbp.MODULE ARGUMENTS`.
    """
    start = next(i for i, word in enumerate(command) if word.startswith("megatron_csbp."))
    launcher = list(command[:start])
    world_size = int(launcher[launcher.index("--nproc-per-node") + 1]) if "--nproc-per-node" in launcher else 1
    request = {"module": command[start], "arguments": list(command[start + 1 :])}
    return ranks.call("tests.support.forked_module:run", request, world_size)


def run(request: dict[str, Any]) -> None:
    """Be one rank of `run_module`."""
    sys.argv = [request["module"], *request["arguments"]]
    sys.exit(importlib.import_module(request["module"]).main())
