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
    "rotary_base",
    "rotary_percent",
)
_MODEL = (
    "num_layers",
    "hidden_size",
    "swiglu",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "padded_vocab_size",
    "position_embedding_type",
    "normalization",
    "qk_layernorm",
    "add_bias_linear",
    "untie_embeddings_and_output_weights",
    "num_experts",
    "experimental_attention_variant",
    "linear_attention_freq",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "attention_output_gate",
    "apply_layernorm_1p",
)
_OPTIMIZER = ("bf16", "fp16", "use_distributed_optimizer", "lr", "min_lr")
_FLAGS = {"clean_seq_length": "--seq-length", "add_bias_linear": "--disable-bias-linear"}


def check_resume(args: Namespace) -> None:
    """Compare with the arguments in the checkpoint that `--load` resumes.

    `--finetune` starts a new run from old weights, and a checkpoint of a plain autoregressive run has no
    block-diffusion arguments: both may differ. The model's sizes may not, in either case.

    Raises:
        ValueError: block size, mask id, objective, schedule or another argument of `_FIXED` differs, or one of the
            model or of the optimizer.
    """
    saved = _saved_arguments(args, args.load)
    if saved is None:
        return
    for name in _MODEL:
        before, now = _model_value(saved, name), _model_value(args, name)
        if before is not None and now is not None and before != now:
            differs, use = _in_words(name, before, now)
            raise ValueError(
                f"{differs} in the checkpoint that --load {args.load} names: its weights do not fit. {use}."
            )
    if not args.finetune and not args.no_load_optim and not getattr(saved, "no_save_optim", None):
        _check_optimizer(args, saved)
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
            differs, use = _in_words(name, before, now)
            raise ValueError(
                f"{differs} in the checkpoint that --load {args.load} resumes: a run keeps its noise and its loss. "
                f"{use}, or --finetune to start a new run from these weights."
            )


def _check_optimizer(args: Namespace, saved: Namespace) -> None:
    """Check that the optimizer's state can be found again: Megatron looks it up by all of these."""
    for name in _OPTIMIZER:
        before, now = getattr(saved, name, None), getattr(args, name)
        if hasattr(saved, name) and before != now:
            differs, use = _in_words(name, before, now)
            raise ValueError(
                f"{differs} in the checkpoint that --load {args.load} resumes: its optimizer state does not fit. "
                f"{use}, or --no-load-optim to start the optimizer anew."
            )


def _model_value(args: Namespace, name: str) -> object:
    """Return an argument of the model as it takes effect; None if it is not known."""
    if name == "num_query_groups" and not getattr(args, "group_query_attention", True):
        return getattr(args, "num_attention_heads", None)  # Megatron fills it in so, but only later in a run
    if name == "num_experts" and hasattr(args, name):
        return args.num_experts or 0
    return getattr(args, name, None)


def _in_words(name: str, before: object, now: object) -> tuple[str, str]:
    """Say how an argument differs from a checkpoint's, and what to use."""
    flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
    if name == "num_experts" and not before:
        return f"{flag} {now} is given and was not", f"Leave out {flag}"
    if not isinstance(now, bool):
        return f"{flag} {now} differs from {before}", f"Use {flag} {before}"
    given = now != (name == "add_bias_linear")  # --disable-bias-linear says the opposite
    differs = f"{flag} is given and was not" if given else f"{flag} is not given and was"
    return differs, f"{'Leave out' if given else 'Add'} {flag}"


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
    if iteration is None:
        return None
    if not (Path(folder) / f"iter_{iteration:07d}").is_dir():
        source = "latest_checkpointed_iteration.txt names it" if args.ckpt_step is None else "--ckpt-step asks for it"
        there = sorted(int(path.name[5:]) for path in Path(folder).glob("iter_*") if path.name[5:].isdigit())
        raise ValueError(
            f"{folder} has no checkpoint of iteration {iteration} ({source}); it has "
            f"{', '.join(map(str, there)) or 'none'}. Choose one with --ckpt-step, or leave out --load."
        )
    return megatron_compat.load_checkpoint_arguments(Path(folder), iteration)


def latest_iteration(folder: Path) -> int | None:
    """Return the iteration in Megatron's tracker file; None if there is no checkpoint or it is a release."""
    tracker = folder / "latest_checkpointed_iteration.txt"
    text = tracker.read_text().strip() if tracker.is_file() else ""
    return int(text) if text.isdigit() else None
