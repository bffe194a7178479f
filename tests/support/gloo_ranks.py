# SPDX-License-Identifier: Apache-2.0
"""One spawn of gloo ranks for a whole test file: the ranks collect facts, and ordinary tests judge them."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

Facts = dict[str, Any]


def facts_of_ranks(collect: Callable[[], Facts], world_size: int, folder: Path) -> list[Facts]:
    """Run a top-level function on each rank of a gloo group, and return what each rank found, as JSON holds it.

    Args:
        collect: called with the default group initialised; may destroy it.
        world_size: ranks.
        folder: an empty folder.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "OMP_NUM_THREADS", "1")
        torch.multiprocessing.spawn(_run_rank, args=(collect, world_size, str(folder)), nprocs=world_size)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world_size)]


def _run_rank(rank: int, collect: Callable[[], Facts], world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    facts = collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    Path(folder, f"rank{rank}.json").write_text(json.dumps(facts))
