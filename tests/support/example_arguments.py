# SPDX-License-Identifier: Apache-2.0
"""Takes a command line through Megatron's parser and all checks at the world size that it is for, on one process.

Nothing before training communicates, so one process can be any rank of any world.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

FACTS = (
    "clean_seq_length",
    "context_parallel_size",
    "block_parallel_size",
    "data_parallel_size",
    "diffusion_scheme",
    "padded_vocab_size",
    "mask_token_id",
    "seq_length",
)


def validate(request: dict[str, Any]) -> None:
    """Validate a command line and write down what came out.

    Args:
        request: `arguments`; `world_size`; `facts`: file to write JSON to; `as_on_hopper`: whether to check what is
            checked on such a GPU without Transformer Engine and Apex.
    """
    from megatron_csbp import check_mode, cpu_runtime, megatron_compat, training_setup
    from megatron_csbp.configuration.hardware_queues import set_one_queue
    from tests.support.pretended_gpu import pretend_hopper

    os.environ["WORLD_SIZE"] = str(request["world_size"])
    os.environ.pop("MASTER_ADDR", None)  # or this rank would wait for the others, to compare how they start
    if request.get("as_on_hopper", False):
        pretend_hopper()
        set_one_queue(request["arguments"], os.environ)
    runtime = cpu_runtime.install("cpu")
    megatron_compat.ensure_dataset_helpers()
    sys.argv = ["pretrain_gpt", *request["arguments"]]
    # Mock data stand in for data that a recipe leaves to the command line; they may hold its mask token.
    args = training_setup.parse_and_validate_args(runtime, set_defaults=check_mode.leave_data_open)
    config = training_setup.model_config_from_args(args)
    facts: dict[str, Any] = {name: getattr(args, name) for name in FACTS}
    facts["model"] = {
        name: value
        for name, value in (asdict(config.transformer) | vars(config.transformer)).items()
        if isinstance(value, int | float | str)
    }
    Path(request["facts"]).write_text(json.dumps(facts))
