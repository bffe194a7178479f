# SPDX-License-Identifier: Apache-2.0
"""Rules of Megatron's own that it checks late or words badly: batch sizes, schedule, tokenizer, packages.

They hold with and without block diffusion. Imports nothing of Megatron.
"""

import importlib.util
from argparse import Namespace
from pathlib import Path

from megatron_csbp.configuration.hub_rules import HUB_NAME

_COUNTS = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("seq_length", "make_vocab_size_divisible_by", "log_interval", "moe_router_topk"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"),
    *("num_layers_per_virtual_pipeline_stage", "recompute_num_layers", "seed"),
)
_OF_A_FILE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer")


def check_training(args: Namespace) -> None:
    """Check what every training run needs, before Megatron's own validation.

    Raises:
        ValueError: see the single rules.
    """
    for rule in (
        check_counts,
        check_batch_sizes,
        check_warmup,
        check_rates,
        check_saving,
        check_tokenizer,
        check_packages,
        check_profiler,
    ):
        rule(args)


def check_counts(args: Namespace) -> None:
    """Sizes that Megatron divides by are at least 1, and so on: it fails without naming the flag."""
    for name in _COUNTS:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1.")
    if args.num_workers < 0:
        raise ValueError(f"--num-workers {args.num_workers} must be at least 0; 2 is the default.")
    if not args.rotary_base > 0:
        raise ValueError(f"--rotary-base {args.rotary_base} must be above 0; for example 10000.")
    if not 0.0 < args.rotary_percent <= 1.0:
        raise ValueError(f"--rotary-percent {args.rotary_percent} must be above 0 and at most 1; for example 1.0.")


def check_batch_sizes(args: Namespace) -> None:
    """Whole micro-batches on every data-parallel rank, in training and in evaluation."""
    if args.micro_batch_size is None:
        raise ValueError("--micro-batch-size is not given: samples in one forward pass; for example 1.")
    group_size = max(args.context_parallel_size, getattr(args, "block_parallel_size", 1))
    ranks = args.world_size // (args.tensor_model_parallel_size * args.pipeline_model_parallel_size * group_size)
    if ranks < 1 or args.step_batch_size_schedule is not None:
        return  # Megatron says how many it needs; a schedule is checked step by step
    for micro, whole in (
        ("micro_batch_size", "global_batch_size"),
        ("eval_micro_batch_size", "eval_global_batch_size"),
    ):
        micro = micro if getattr(args, micro) is not None else "micro_batch_size"
        whole = whole if getattr(args, whole) is not None else "global_batch_size"
        size, total = getattr(args, micro), getattr(args, whole)
        for name, value in ((micro, size), (whole, total)):
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1; for example 1.")
        if total is not None and total % (size * ranks):
            works = -(-total // (size * ranks)) * size * ranks
            raise ValueError(
                f"--{whole.replace('_', '-')} {total} must be a multiple of --{micro.replace('_', '-')} {size} x "
                f"{ranks} data-parallel rank(s) = {size * ranks}; for example --{whole.replace('_', '-')} {works}."
            )


def check_warmup(args: Namespace) -> None:
    """The learning rate decays for longer than it warms up."""
    if args.skip_train:
        return
    fraction = args.lr_warmup_fraction
    if fraction is not None:
        if not 0.0 <= fraction < 1.0:
            raise ValueError(f"--lr-warmup-fraction {fraction} must be at least 0 and below 1; for example 0.01.")
        return
    unit = "samples" if args.train_samples else "iters"
    warmup = getattr(args, f"lr_warmup_{unit}")
    source = f"lr_decay_{unit}" if getattr(args, f"lr_decay_{unit}") is not None else f"train_{unit}"
    decay = getattr(args, source)
    if decay is not None and warmup >= decay:
        raise ValueError(
            f"--lr-warmup-{unit} {warmup} must be below --{source.replace('_', '-')} {decay}, over which the learning "
            f"rate decays; for example --lr-warmup-{unit} {decay // 10}."
        )


def check_rates(args: Namespace) -> None:
    """There is a length of training and a learning rate, and rates are in order."""
    if args.skip_train:
        return
    if not args.train_iters and not args.train_samples:
        raise ValueError("neither --train-iters nor --train-samples is given; for example --train-iters 1000.")
    if args.lr is None:
        raise ValueError("--lr is not given: the highest learning rate; for example --lr 1e-4.")
    if args.min_lr is not None and not 0.0 <= args.min_lr <= args.lr:
        raise ValueError(
            f"--min-lr {args.min_lr} must lie between 0 and --lr {args.lr}; for example {args.lr / 10:g}."
        )
    if args.lr_warmup_init > args.lr:
        raise ValueError(f"--lr-warmup-init {args.lr_warmup_init} must not be above --lr {args.lr}; 0 is usual.")
    if args.lr_decay_style == "WSD" and args.lr_wsd_decay_iters is None and args.lr_wsd_decay_samples is None:
        raise ValueError(
            "--lr-decay-style WSD needs --lr-wsd-decay-iters: how long the final decay is; for example 100."
        )


def check_saving(args: Namespace) -> None:
    """Megatron wants an interval with a folder."""
    if args.save is not None and args.save_interval is None and not args.skip_train:
        raise ValueError(
            f"--save {args.save} needs --save-interval: how many iterations lie between checkpoints; for example "
            "--save-interval 1000."
        )


def check_tokenizer(args: Namespace) -> None:
    """A tokenizer is named, and its files are there."""
    kind, model = args.tokenizer_type, args.tokenizer_model
    if args.vocab_file is None and kind in (None, "GPT2BPETokenizer", "BertWordPieceLowerCase", "BertWordPieceCase"):
        if kind is None:
            raise ValueError(
                "--tokenizer-type is not given; for a Hugging Face folder --tokenizer-type HuggingFaceTokenizer "
                "--tokenizer-model FOLDER."
            )
        raise ValueError(
            f"--tokenizer-type {kind} needs --vocab-file (and --merge-file for GPT-2); for a Hugging Face folder use "
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER."
        )
    if kind != "HuggingFaceTokenizer" and kind not in _OF_A_FILE:
        return
    if model is None:
        raise ValueError(f"--tokenizer-type {kind} needs --tokenizer-model with its folder or file.")
    path = Path(model)
    if kind in _OF_A_FILE and not path.is_file() and "://" not in model:
        raise ValueError(f"--tokenizer-model {model} is not a file here; a {kind} is loaded from one.")
    if kind == "HuggingFaceTokenizer" and not path.exists() and not HUB_NAME.fullmatch(model):
        raise ValueError(
            f"--tokenizer-model {model} does not exist here: a folder with tokenizer.json and tokenizer_config.json, "
            "or the name of a repository such as Qwen/Qwen3-8B, which is downloaded."
        )


def check_packages(args: Namespace) -> None:
    """What a flag needs beside Megatron is installed."""
    needed = (
        ("--wandb-project", "wandb", bool(args.wandb_project) and args.rank == args.world_size - 1),
        (f"--optimizer {args.optimizer}", "emerging_optimizers", args.optimizer not in ("adam", "sgd")),
        ("--num-distributed-optimizer-instances", "einops", args.num_distributed_optimizer_instances > 1),
    )
    for flag, package, is_needed in needed:
        if is_needed and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"{flag} needs the package {package.replace('_', '-')}, which is not installed: pip install "
                f"{package.replace('_', '-')}, or leave out {flag.split(' ')[0]}."
            )
    if args.wandb_project and not args.wandb_exp_name:
        raise ValueError(f"--wandb-project {args.wandb_project} needs --wandb-exp-name, the name of this run.")


def check_profiler(args: Namespace) -> None:
    """PyTorch's profiler has somewhere to write."""
    if args.profile and args.use_pytorch_profiler and args.tensorboard_dir is None:
        raise ValueError(
            "--use-pytorch-profiler writes beside --tensorboard-dir, which is not given; for example "
            "--tensorboard-dir logs/tensorboard."
        )
