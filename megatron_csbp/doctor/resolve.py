# SPDX-License-Identifier: Apache-2.0
"""What a command line comes to: `python -m megatron_csbp.doctor.resolve FILE RANKS ARGUMENTS`.

A process of its own: the check mode of the entry, and then what it resolved, as JSON in a file.
"""

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from megatron_csbp import pretrain_gpt
from megatron_csbp.check_mode import FLAG


def main() -> None:
    """Run the check mode, and write what it found if every check has passed.

    Raises:
        SystemExit: with the status of the check mode.
    """
    file, ranks, *words = sys.argv[1:]
    sys.argv = ["megatron_csbp.pretrain_gpt", *words, FLAG, ranks]
    try:
        pretrain_gpt.main()
    except SystemExit as ended:
        if not ended.code:
            Path(file).write_text(json.dumps(_resolved()))
        raise


def _resolved() -> dict[str, Any]:
    from megatron.training import get_args

    from megatron_csbp.agreement.start_facts import argument_facts
    from megatron_csbp.arguments import is_block_diffusion
    from megatron_csbp.configuration.flag_names import FlagNames

    args = get_args()
    folders = (args.save, args.tensorboard_dir, args.data_cache_path)
    found: dict[str, Any] = {
        "arguments": argument_facts(args, FlagNames()),
        "folders": [value for value in folders if value and "://" not in value],  # not object storage
        "tensor": args.tensor_model_parallel_size,
        "context": args.context_parallel_size,
        "gather_bytes": _gather_bytes(args) if is_block_diffusion(args) else 0,
    }
    return found


def _gather_bytes(args: Namespace) -> int:
    """Return what the largest gather of an attention layer brings a rank from the others, one head group."""
    from megatron_csbp.arguments import masks, static_plans
    from megatron_csbp.configuration.performance_arguments import exchange_bytes
    from megatron_csbp.transformer.geometry.scheme import CopyKind

    plans = static_plans(args, rank=0)
    most = max((exchange_bytes(args, plans.plan(mask), CopyKind.CLEAN) for mask in masks(args)), default=0)
    return int(most // args.csbp_head_groups)


if __name__ == "__main__":
    main()
