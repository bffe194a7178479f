# SPDX-License-Identifier: Apache-2.0
"""What a run may ask of the checkpoint that it loads: files, network, vocabulary, and what a resumed run keeps."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_csbp import megatron_checkpoints
from megatron_csbp.configuration.checkpoint_folder import (
    Checkpoint,
    check_format,
    check_sizes,
    checkpoint_to_load,
    readable,
)
from megatron_csbp.configuration.flag_names import FlagNames
from megatron_csbp.configuration.network_rules import check_network
from megatron_csbp.configuration.optimizer_rules import check_optimizer
from megatron_csbp.configuration.vocabulary_rules import check_padded_vocabulary

_NEW_RUN = "--finetune to start a new run from these weights"
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
    "query_scale_beta",
    "corrupted_views",
    "window_anchor",
    "pack_documents",
    "loss_on",
    "long_documents",
)
_BEFORE_ITS_FLAG = {
    "corrupted_views": 1,
    "window_anchor": "position",
    "pack_documents": False,
    "loss_on": "answers",
    "long_documents": "refuse",
}
"""What a run did before there was a flag; None in all other cases."""


@dataclass(frozen=True)
class Start:
    """What a run starts from.

    Attributes:
        checkpoint: None for random weights.
        is_resumed: whether an earlier run goes on, with its iteration.
        notes: what differs from the checkpoint and may, for the start summary.
        saved: the checkpoint's arguments; None if it has none.
    """

    checkpoint: Checkpoint | None = None
    is_resumed: bool = False
    notes: list[str] = field(default_factory=list)
    saved: Namespace | None = None


def check_start(args: Namespace, flags: FlagNames | None = None) -> Start:
    """Hold a run against the checkpoint that it will load, by whatever flag.

    `--finetune`, `--pretrained-checkpoint` and a release start a new run from old weights, in the same network. With
    the first two the noise and the loss may differ; a release keeps those that it names.

    Args:
        args: validated arguments.
        flags: how arguments are spelled.

    Returns:
        What the run starts from.

    Raises:
        ValueError: files that cannot be read; another network; another vocabulary; in a resumed run another noise,
            loss or optimizer, or nothing left to train.
    """
    flags = flags or FlagNames()
    found = check_files(args)
    if found is None:
        return Start()
    checkpoint, state = found
    starts_anew = args.finetune or checkpoint.flag.startswith("--pretrained-checkpoint")
    is_resumed = not starts_anew and not checkpoint.is_release
    notes: list[str] = []
    saved: Namespace | None = state.get("args")
    if is_resumed:
        _check_work_left(args, saved, checkpoint, state)
    if saved is None:
        return Start(checkpoint, is_resumed, ["the checkpoint has no arguments to compare with this run's"])
    if not args.moe_use_upcycling:  # which makes another network of the weights on purpose
        notes += check_network(args, saved, checkpoint.flag, is_resumed, flags)
    notes += check_padded_vocabulary(args, saved, checkpoint.flag)
    if not starts_anew:
        _check_noise_and_loss(args, saved, checkpoint.flag, flags)
    if is_resumed:
        check_optimizer(args, saved, state, checkpoint.flag, flags)
        if _becomes_block_diffusion(args, saved):
            notes.append(
                "an autoregressive run goes on as a block-diffusion one, with its optimizer, iterations and data; "
                "--finetune would start anew from its weights"
            )
    return Start(checkpoint, is_resumed, notes, saved)


def _check_noise_and_loss(args: Namespace, saved: Namespace, source: str, flags: FlagNames) -> None:
    """A resumed run keeps its noise and its loss; a checkpoint of an autoregressive run has none to keep."""
    if getattr(saved, "diffusion_block_size", None) is None:
        return
    if args.diffusion_block_size is None:
        raise ValueError(
            f"{source} resumes a block-diffusion run, but --diffusion-block-size is not given: training would go on "
            f"with another loss. Give --diffusion-block-size {saved.diffusion_block_size} and the run's other flags, "
            "or --finetune to start a plain run from these weights."
        )
    for name in _FIXED:
        before, now = getattr(saved, name, _BEFORE_ITS_FLAG.get(name)), getattr(args, name)
        if before != now:
            differs, use = flags.difference(name, before, now)
            raise ValueError(
                f"{differs} in the checkpoint that {source} resumes: a run keeps its noise and its loss. {use}, or "
                f"{_NEW_RUN}."
            )


def _becomes_block_diffusion(args: Namespace, saved: Namespace) -> bool:
    return args.diffusion_block_size is not None and getattr(saved, "diffusion_block_size", None) is None


def _check_work_left(
    args: Namespace, saved: Namespace | None, checkpoint: Checkpoint, state: Mapping[str, Any]
) -> None:
    """A run that has nothing left to train would end with status 0, as if it had trained."""
    if args.skip_train:
        return
    other_loss = saved is not None and _becomes_block_diffusion(args, saved)
    hint = " (the checkpoint is of an autoregressive run, whose iterations would count)" if other_loss else ""
    done, flag, given = state.get("iteration", checkpoint.iteration), "--train-iters", args.train_iters
    if args.train_samples:
        done, flag, given = getattr(saved, "consumed_train_samples", 0), "--train-samples", args.train_samples
    if given is not None and done >= given:
        raise ValueError(
            f"{checkpoint.flag} has done {done} of {flag} {given}: nothing is left to train{hint}. Use {_NEW_RUN}; or "
            f"go on with {flag} above {done} and --override-opt-param-scheduler, which takes the "
            "learning-rate schedule from the flags; or only evaluate with --skip-train."
        )


def check_files(args: Namespace) -> tuple[Checkpoint, Mapping[str, Any]] | None:
    """Check that what a run will load can be read.

    Returns:
        The checkpoint and what it says of itself; None where the run starts from random weights.

    Raises:
        ValueError: it cannot. Sizes of files are looked at on the first rank only.
    """
    checkpoint = checkpoint_to_load(args)
    if checkpoint is None:
        return None
    check_format(checkpoint)
    if args.rank == 0:
        check_sizes(checkpoint)
    return checkpoint, readable(checkpoint, megatron_checkpoints.common_state)


def use_checkpoint_length(args: Namespace) -> None:
    """Take L, not the row count, where `--use-checkpoint-args` supplies `--seq-length` from a block-diffusion run."""
    found = check_files(args)
    saved = found[1].get("args") if found is not None else None
    if saved is not None and getattr(saved, "clean_seq_length", None) is not None:
        args.seq_length = saved.clean_seq_length
