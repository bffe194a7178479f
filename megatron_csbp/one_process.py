# SPDX-License-Identifier: Apache-2.0
"""Commands that also run without torchrun."""

import os


def be_the_only_rank() -> None:
    """Tell PyTorch that this process is a whole job, unless a launcher has given it a rank."""
    if "RANK" in os.environ:
        return
    # Port 0: the system chooses a free one, and nobody else needs to know it.
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
