# SPDX-License-Identifier: Apache-2.0
"""A resumed run finds the state of its optimizer again."""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megatron_csbp import megatron_checkpoints
from megatron_csbp.configuration.flag_names import FlagNames
from megatron_csbp.configuration.schedule_rules import check_schedule

# Megatron finds the state of a group of parameters by the rates of the group, and tensors by what they are kept in.
_FOUND_BY = (
    "bf16",
    "fp16",
    "use_distributed_optimizer",
    "optimizer",
    "lr",
    "min_lr",
    "decoupled_lr",
    "decoupled_min_lr",
)
_ANEW = "--no-load-optim to start the optimizer anew"


def check_optimizer(
    args: Namespace, saved: Namespace, state: Mapping[str, Any], source: str, flags: FlagNames
) -> None:
    """Check that a resumed run can load the optimizer's state, unless `--no-load-optim` leaves it.

    Args:
        args: validated arguments.
        saved: the checkpoint's arguments.
        state: what else the checkpoint says, from `megatron_checkpoints.common_state`.
        source: how the run came to the checkpoint, for messages.
        flags: how arguments are spelled.

    Raises:
        ValueError: there is no state, or it would not be found, or it cannot be cut as this run needs it.
    """
    if args.no_load_optim or args.skip_train:
        return
    if getattr(saved, "no_save_optim", None):
        raise ValueError(
            f"{source} was saved with --no-save-optim: there is no optimizer state to resume from. Use {_ANEW}, or "
            "--finetune to start a new run from these weights."
        )
    for name in _FOUND_BY:
        before, now = getattr(saved, name, None), getattr(args, name, None)
        if hasattr(saved, name) and before != now:
            differs, use = flags.difference(name, before, now)
            raise ValueError(
                f"{differs} in the checkpoint that {source} resumes: its optimizer state does not fit. {use}, or "
                f"{_ANEW}."
            )
    _check_division(args, saved, megatron_checkpoints.sharding_type(state), source)
    check_schedule(args, saved, state.get("opt_param_scheduler"), source, flags)


def _check_division(args: Namespace, saved: Namespace, kind: str | None, source: str) -> None:
    """By default the distributed optimizer's state is cut so that it fits one division and one vocabulary only."""
    if not args.use_distributed_optimizer or kind is None or megatron_checkpoints.survives_resharding(kind):
        return
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "padded_vocab_size"):
        before, now = getattr(saved, name, None), getattr(args, name)
        if before is not None and before != now:
            what = "the padded vocabulary of" if name == "padded_vocab_size" else f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{what} {now} differs from {before} in the checkpoint that {source} resumes, "
                f"whose distributed optimizer was saved as {kind}, which fits the same division only. Resume once "
                "with the old value and --dist-ckpt-optim-fully-reshardable, and go on from the checkpoint that this "
                f"saves; or use {_ANEW}."
            )
