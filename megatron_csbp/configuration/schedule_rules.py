# SPDX-License-Identifier: Apache-2.0
"""A resumed run keeps its schedule of learning rate and weight decay, unless a flag says which one counts."""

import copy
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megatron_csbp.configuration.flag_names import FlagNames

_FLAGS = (
    "train_iters",
    "train_samples",
    "global_batch_size",
    "lr_decay_style",
    "lr_decay_iters",
    "lr_decay_samples",
    "lr_warmup_iters",
    "lr_warmup_samples",
    "lr_warmup_fraction",
    "start_weight_decay",
    "end_weight_decay",
    "weight_decay_incr_style",
)


def check_schedule(
    args: Namespace, saved: Namespace, state: Mapping[str, Any] | None, source: str, flags: FlagNames
) -> None:
    """Compare the schedule with that of the checkpoint, which Megatron refuses late, by names of its own.

    Args:
        args: validated arguments.
        saved: the checkpoint's arguments.
        state: the state of the checkpoint's scheduler; None if it has none.
        source: how the run came to the checkpoint, for messages.
        flags: how arguments are spelled.

    Raises:
        ValueError: a flag makes it another schedule.
    """
    if state is None or args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler:
        return
    now = _schedule(args)
    if all(state.get(name, value) == value for name, value in now.items()):
        return
    differs, remedies = [], []
    for name in _FLAGS:
        before = getattr(saved, name, None)
        if before != getattr(args, name) and _schedule(_with(args, name, before)) != now:
            difference, remedy = flags.difference(name, before, getattr(args, name))
            differs.append(difference)
            remedies.append(remedy)
    raise ValueError(
        f"{' and '.join(differs) or 'the schedule differs'} in the checkpoint that {source} resumes: its schedule of "
        f"learning rate and weight decay was made for that. {'. '.join(remedies) or 'Use the flags of that run'}; or "
        "--override-opt-param-scheduler for the schedule of the flags, or --use-checkpoint-opt-param-scheduler for "
        "that of the checkpoint."
    )


def _with(args: Namespace, name: str, value: object) -> Namespace:
    changed = copy.copy(args)
    setattr(changed, name, value)
    return changed


def _schedule(args: Namespace) -> dict[str, object]:
    """Return what Megatron's scheduler would compare, by its names. Steps are samples."""
    if args.train_iters:
        decay = (args.lr_decay_iters or args.train_iters) * args.global_batch_size
        warmup, whole = args.lr_warmup_iters * args.global_batch_size, args.train_iters * args.global_batch_size
    else:
        whole = args.train_samples or 0
        decay, warmup = args.lr_decay_samples or whole, args.lr_warmup_samples
    if args.lr_warmup_fraction is not None:
        warmup = args.lr_warmup_fraction * decay
    return {
        "lr_warmup_steps": warmup,
        "lr_decay_steps": decay,
        "lr_decay_style": args.lr_decay_style,
        "start_wd": args.start_weight_decay,
        "end_wd": args.end_weight_decay,
        "wd_incr_steps": whole,
        "wd_incr_style": args.weight_decay_incr_style,
    }
