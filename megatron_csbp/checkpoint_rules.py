# SPDX-License-Identifier: Apache-2.0
"""A resumed run keeps what its noise and its loss are made of."""

from argparse import Namespace
from pathlib import Path

from megatron_csbp import megatron_compat

_FIXED = (
    "diffusion_block_size",
    "mask_token_id",
    "diffusion_objective",
    "clean_attention",
    "noise_schedule",
    "noise_eps",
    "diffusion_loss_weight",
    "ar_loss_weight",
    "clean_seq_length",
    "seed",
)


def check_resume(args: Namespace) -> None:
    """Compare with the arguments in the checkpoint that `--load` resumes.

    `--finetune` starts a new run from old weights, and a checkpoint of a plain autoregressive run has no
    block-diffusion
    arguments: both may differ.

    Raises:
        ValueError: block size, mask id, objective, schedule or another argument of `_FIXED` differs.
    """
    saved = None if args.finetune else _saved_arguments(args)
    if saved is None or getattr(saved, "diffusion_block_size", None) is None:
        return
    for name in _FIXED:
        before, now = getattr(saved, name, None), getattr(args, name)
        if before != now:
            flag = "--seq-length" if name == "clean_seq_length" else f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{flag} {now} differs from {before} in the checkpoint that --load {args.load} resumes: a run keeps "
                f"its noise and its loss. Use {flag} {before}, or --finetune to start a new run from these weights."
            )


def use_checkpoint_length(args: Namespace) -> None:
    """Take L, not the row count, where `--use-checkpoint-args` supplies `--seq-length` from a block-diffusion run."""
    saved = _saved_arguments(args)
    if saved is not None and getattr(saved, "clean_seq_length", None) is not None:
        args.seq_length = saved.clean_seq_length


def _saved_arguments(args: Namespace) -> Namespace | None:
    """Return the arguments in the checkpoint that `--load` names; None if there is no such checkpoint."""
    if args.load is None:
        return None
    iteration = args.ckpt_step if args.ckpt_step is not None else latest_iteration(Path(args.load))
    return None if iteration is None else megatron_compat.load_checkpoint_arguments(Path(args.load), iteration)


def latest_iteration(folder: Path) -> int | None:
    """Return the iteration in Megatron's tracker file; None if there is no checkpoint or it is a release."""
    tracker = folder / "latest_checkpointed_iteration.txt"
    text = tracker.read_text().strip() if tracker.is_file() else ""
    return int(text) if text.isdigit() else None
