# SPDX-License-Identifier: Apache-2.0
"""The flags of `megatron_csbp.generate`, and what a checkpoint must be to be generated from."""

import argparse
from argparse import ArgumentParser, Namespace

from megatron_csbp.generation.decoding import ConfidenceThreshold, FixedSteps, UncoverRule

DEFAULT_CONFIDENCE = 0.9
SHIFTED_OBJECTIVES = ("fast-dllm-v2",)
"""Objectives whose row i - 1 predicts token i."""

_PLAIN_ATTENTION_ONLY = (
    "multi_latent_attention",
    "window_size",
    "experimental_attention_variant",
    "hybrid_layer_pattern",
    "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json",
    "mtp_num_layers",
)
_OTHER_PARALLEL_SIZES = ("pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the flags of text generation to Megatron's parser."""
    group = parser.add_argument_group("text generation (megatron_csbp.generate)")
    group.add_argument("--prompt", action="append", default=None, help="Text to continue; may be repeated.")
    group.add_argument("--prompt-file", default=None, help="A UTF-8 file that is one prompt.")
    group.add_argument("--max-new-tokens", type=int, default=128, help="Tokens to write behind each prompt.")
    group.add_argument(
        "--decoding",
        choices=("block", "autoregressive"),
        default=None,
        help="block: denoise one block after the other. autoregressive: token by token, for checkpoints whose clean "
        "tokens see only earlier ones. Default: block where the checkpoint has a block size.",
    )
    group.add_argument(
        "--confidence-threshold",
        type=float,
        default=None,
        help=f"In each pass over a block, keep every token of at least this probability, and the most probable one. "
        f"Default: {DEFAULT_CONFIDENCE}. Above 1, one token a pass.",
    )
    group.add_argument(
        "--steps-per-block",
        type=int,
        default=None,
        help="Instead of a threshold: passes over a block, each of which keeps an equal share of the tokens.",
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="0: the most probable tokens. Else logits are divided by it and tokens are drawn, with --seed.",
    )
    group.add_argument(
        "--token-shift",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="Whether row i - 1 predicts token i. Default: by the checkpoint's objective.",
    )
    group.add_argument("--show-steps", action="store_true", help="Print each block after every pass over it.")


def check(args: Namespace) -> None:
    """Check the flags and the checkpoint's arguments, before Megatron's own checks; fill in the decoding.

    Raises:
        ValueError: a rule is broken; on every rank, before any collective.
    """
    for name in _OTHER_PARALLEL_SIZES:
        if getattr(args, name) != 1:
            raise ValueError(
                f"--{name.replace('_', '-')} {getattr(args, name)}: text is generated on one process or on the ranks "
                "of --tensor-model-parallel-size; leave the flag out. Checkpoints load in any of them."
            )
    if args.world_size != args.tensor_model_parallel_size:
        raise ValueError(
            f"--tensor-model-parallel-size {args.tensor_model_parallel_size} on {args.world_size} rank(s): they must "
            f"be equal; give --tensor-model-parallel-size {args.world_size}."
        )
    for name in _PLAIN_ATTENTION_ONLY:
        if getattr(args, name, None):
            raise ValueError(
                f"the checkpoint has --{name.replace('_', '-')} {getattr(args, name)}, whose layers the generator "
                "does not have; it runs plain GPT layers with full attention."
            )
    if args.position_embedding_type not in ("rope", "yarn", "learned_absolute", "none"):
        raise ValueError(
            f"--position-embedding-type {args.position_embedding_type} is not supported; rope, yarn, learned_absolute "
            "and none are."
        )
    _check_decoding(args)


def _check_decoding(args: Namespace) -> None:
    """Check and fill in how tokens are chosen."""
    if not args.prompt and args.prompt_file is None:
        raise ValueError('no prompt: give --prompt "text" or --prompt-file FILE.')
    if args.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens {args.max_new_tokens} must be at least 1; for example 128.")
    if args.temperature < 0:
        raise ValueError(f"--temperature {args.temperature} must be 0 or more; 0 takes the most probable tokens.")
    if args.decoding is None:
        args.decoding = "autoregressive" if args.diffusion_block_size is None else "block"
    if args.decoding == "autoregressive":
        _check_autoregressive(args)
        return
    if args.diffusion_block_size is None or args.mask_token_id is None:
        raise ValueError(
            "--decoding block needs --diffusion-block-size and --mask-token-id, which this checkpoint does not name: "
            "it was trained autoregressively. Use --decoding autoregressive."
        )
    if args.confidence_threshold is not None and args.steps_per_block is not None:
        raise ValueError(
            f"--confidence-threshold {args.confidence_threshold} and --steps-per-block {args.steps_per_block} are two "
            "ways to choose what a pass keeps; give one of them."
        )
    if args.confidence_threshold is not None and args.confidence_threshold <= 0:
        raise ValueError(f"--confidence-threshold {args.confidence_threshold} must be above 0; for example 0.9.")
    if args.steps_per_block is not None and args.steps_per_block < 1:
        raise ValueError(
            f"--steps-per-block {args.steps_per_block} must be at least 1; {args.diffusion_block_size} uncovers one "
            "token a pass."
        )
    if args.token_shift is None:
        args.token_shift = args.diffusion_objective in SHIFTED_OBJECTIVES
    if args.token_shift and args.clean_attention != "block-causal":
        raise ValueError(
            f"--token-shift with --clean-attention {args.clean_attention}: the first token of a block is predicted by "
            "the last row of the block before, which must see its whole block; use --no-token-shift."
        )


def _check_autoregressive(args: Namespace) -> None:
    """No row may have seen the token that it predicts."""
    for name in ("confidence_threshold", "steps_per_block", "token_shift"):
        if getattr(args, name) is not None:
            raise ValueError(
                f"--{name.replace('_', '-')} {getattr(args, name)} chooses within blocks, but --decoding is "
                "autoregressive; leave it out."
            )
    if args.diffusion_block_size is not None and args.clean_attention == "block-causal":
        raise ValueError(
            "--decoding autoregressive: the clean tokens of this checkpoint see their whole block (--clean-attention "
            "block-causal), so it never learnt to predict the next one. Use --decoding block."
        )
    args.clean_attention = "token-causal"


def uncover_rule(args: Namespace) -> UncoverRule:
    """Return what a pass over a block keeps."""
    if args.steps_per_block is not None:
        return FixedSteps(args.steps_per_block)
    threshold = args.confidence_threshold
    return ConfidenceThreshold(DEFAULT_CONFIDENCE if threshold is None else threshold)
