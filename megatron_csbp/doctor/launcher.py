# SPDX-License-Identifier: Apache-2.0
"""Whether this process is one of many, and which: torchrun and srun say it in their own ways."""

import subprocess
from collections.abc import MutableMapping
from dataclasses import dataclass

_DEFAULT_PORT = "29500"


@dataclass(frozen=True)
class Place:
    """This process among all.

    Attributes:
        rank: of this process.
        local_rank: on its machine.
        world_size: ranks in all.
    """

    rank: int
    local_rank: int
    world_size: int


def place(environ: MutableMapping[str, str]) -> Place | None:
    """Return this process's place; None if it is alone.

    Args:
        environ: of the process. Under srun, what torchrun would have set is added.

    Raises:
        ValueError: under srun, where nothing says which node is the first.
    """
    tasks = environ.get("SLURM_NTASKS", "1")
    if "RANK" not in environ and "SLURM_PROCID" in environ and int(tasks) > 1:
        environ.update(
            RANK=environ["SLURM_PROCID"],
            LOCAL_RANK=environ["SLURM_LOCALID"],
            WORLD_SIZE=tasks,
            MASTER_ADDR=environ.get("MASTER_ADDR") or _first_node(environ["SLURM_JOB_NODELIST"]),
            MASTER_PORT=environ.get("MASTER_PORT", _DEFAULT_PORT),
        )
    if "RANK" not in environ or int(environ["WORLD_SIZE"]) < 2:
        return None
    return Place(int(environ["RANK"]), int(environ.get("LOCAL_RANK", "0")), int(environ["WORLD_SIZE"]))


def _first_node(nodes: str) -> str:
    """Return the first name of SLURM's short form of a list, "node[01-04]"."""
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(
            f"MASTER_ADDR is not set, and scontrol, which knows the first of the nodes {nodes}, does not work here "
            f"({error}); a container often has none. Before srun: export MASTER_ADDR=$(scontrol show hostnames "
            '"$SLURM_JOB_NODELIST" | head -n 1)'
        ) from error
