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
    "eod_mask_loss",
    "seed",
)
_MODEL = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "padded_vocab_size",
    "position_embedding_type",
)


def check_resume(args: Namespace) -> None:
    """Compare with the arguments in the checkpoint that `--load` resumes.

    `--finetune` starts a new run from old weights, and a checkpoint of a plain autoregressive run has no
    block-diffusion arguments: both may differ. The model's sizes may not, in either case.

    Raises:
        ValueError: block size, mask id, objective, schedule or another argument of `_FIXED` differs.
    """
    saved = _saved_arguments(args, args.load)
    if saved is None:
        return
    for name in _MODEL:
        before, now = getattr(saved, name, None), getattr(args, name, None)
        if before is not None and now is not None and before != now:
            raise ValueError(
                f"--{name.replace('_', '-')} {now} differs from {before} in the checkpoint that --load {args.load} "
                f"names: its weights do not fit. Use --{name.replace('_', '-')} {before}."
            )
    if args.finetune or getattr(saved, "diffusion_block_size", None) is None:
        return
    if args.diffusion_block_size is None:
        raise ValueError(
            f"--load {args.load} resumes a block-diffusion run, but --diffusion-block-size is not given: training "
            f"would go on with another loss. Give --diffusion-block-size {saved.diffusion_block_size} and the run's "
            "other flags, or --finetune to start a plain run from these weights."
        )
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
    saved = _saved_arguments(args, args.load) or _saved_arguments(args, args.pretrained_checkpoint)
    if saved is not None and getattr(saved, "clean_seq_length", None) is not None:
        args.seq_length = saved.clean_seq_length


def _saved_arguments(args: Namespace, folder: str | None) -> Namespace | None:
    """Return the arguments in the checkpoint in a folder; None if there is no such checkpoint."""
    if folder is None:
        return None
    iteration = args.ckpt_step if args.ckpt_step is not None else latest_iteration(Path(folder))
    return None if iteration is None else megatron_compat.load_checkpoint_arguments(Path(folder), iteration)


def latest_iteration(folder: Path) -> int | None:
    """Return the iteration in Megatron's tracker file; None if there is no checkpoint or it is a release."""
    tracker = folder / "latest_checkpointed_iteration.txt"
    text = tracker.read_text().strip() if tracker.is_file() else ""
    return int(text) if text.isdigit() else None
