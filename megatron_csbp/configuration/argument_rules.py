# SPDX-License-Identifier: Apache-2.0
"""What a block-diffusion run may not ask for: one function a rule, one test a rule. Imports nothing of Megatron.

Every rule raises a ValueError on every rank before any collective, naming the flag, its value, the rule and a value
that works.
"""

import math
import re
from argparse import Namespace

from megatron_csbp.configuration.file_rules import check_folders, check_ledger, check_tokenizer_folder
from megatron_csbp.configuration.mask_token_rules import check_mask_token
from megatron_csbp.configuration.model_rules import check_delta_net, check_heads, check_recomputation, check_world_size
from megatron_csbp.configuration.objective_flags import check_objective, num_views
from megatron_csbp.configuration.packing_rules import check_packing
from megatron_csbp.configuration.performance_arguments import check_head_groups, check_loss_chunk_rows
from megatron_csbp.configuration.unsupported_features import UNSUPPORTED
from megatron_csbp.transformer.geometry.scheme import length_error, required_multiple, resolve_scheme

_OWN_FLAGS = (
    "--mask-token-id",
    "--init-mask-token",
    "--context-scheme",
    "--corrupted-views",
    "--window-anchor",
    "--pack-documents",
    "--loss-on",
    "--long-documents",
    "--csbp-all-blocks",
    "--diffusion-objective",
    "--clean-attention",
    "--diffusion-loss-weight",
    "--ar-loss-weight",
    "--noise-schedule",
    "--noise-eps",
    "--block-assignment",
    "--query-scale-beta",
    "--csbp-attention-backend",
    "--csbp-head-groups",
    "--csbp-grad-reduce-dtype",
    "--csbp-loss-chunk-rows",
    "--csbp-delta-net-backend",
    "--csbp-delta-net-state-mib",
    "--csbp-ledger",
    "--csbp-timing",
)


def check_before_megatron(args: Namespace, given: frozenset[str]) -> None:
    """Check every rule that needs no vocabulary and no data.

    Args:
        args: parsed arguments, before Megatron's own validation.
        given: flags that the user gave, as written.

    Raises:
        ValueError: see the single rules.
    """
    if args.diffusion_block_size is None:
        check_no_flag_without_block_size(args, given)
        return
    for rule in (
        check_block_size,
        check_scheme,
        check_world_size,
        check_heads,
        check_recomputation,
        check_views,
        check_window,
        check_delta_net,
        check_length,
        check_sequence_parallel_rows,
        check_mask_token,
        check_objective,
        check_unsupported,
        check_position_embedding,
        check_query_scale,
        check_full_validation,
        check_replicated_router,
        check_head_groups,
        check_loss_chunk_rows,
        check_evaluation_interval,
        check_folders,
        check_ledger,
        check_tokenizer_folder,
    ):
        rule(args)
    check_dropout(args, given)
    check_packing(args, given)


def check_no_flag_without_block_size(args: Namespace, given: frozenset[str]) -> None:
    """Block-diffusion flags mean nothing unless `--diffusion-block-size` turns block diffusion on."""
    if args.block_parallel_size != 1:
        raise ValueError(
            f"--block-parallel-size {args.block_parallel_size} needs --diffusion-block-size, since only diffusion "
            "blocks can be divided; for example --diffusion-block-size 32."
        )
    strays = [flag for flag in _OWN_FLAGS if flag in given]
    if strays:
        raise ValueError(
            f"{', '.join(strays)} given without --diffusion-block-size, which turns block-diffusion training on; add "
            "for example --diffusion-block-size 32, or drop the flag for plain Megatron."
        )


def check_block_size(args: Namespace) -> None:
    """M >= 1."""
    if args.diffusion_block_size < 1:
        raise ValueError(
            f"--diffusion-block-size {args.diffusion_block_size} must be at least 1 token; 32 is a usual value."
        )


def check_scheme(args: Namespace) -> None:
    """Sizes >= 1; above 1 the block-parallel and the context-parallel size are equal."""
    for flag, size in (
        ("--block-parallel-size", args.block_parallel_size),
        ("--context-parallel-size", args.context_parallel_size),
    ):
        if size < 1:
            raise ValueError(f"{flag} {size} must be at least 1; 1 means no division of a sequence over ranks.")
    resolve_scheme(args.context_parallel_size, args.block_parallel_size, args.context_scheme)


def check_views(args: Namespace) -> None:
    """V >= 1."""
    if args.corrupted_views is not None and args.corrupted_views < 1:
        raise ValueError(
            f"--corrupted-views {args.corrupted_views} must be at least 1 copy of a sample; 1 is the default."
        )


def check_window(args: Namespace) -> None:
    """A window looks back: block diffusion has no keys behind a row but those of its own block."""
    if args.window_size is None:
        return
    left, right = args.window_size
    if left < 0 or right != 0:
        raise ValueError(
            f"--window-size {left},{right} must be LEFT,0: a row sees the LEFT clean tokens before its own position "
            f"(or block, see --window-anchor). Use for example --window-size {max(1023, left)},0, or leave it out for "
            "full attention."
        )


def check_length(args: Namespace) -> None:
    """L is a multiple of 2PM, or of M on one rank."""
    if args.seq_length is None:
        raise ValueError("--seq-length is not given; it is the number of clean tokens in a sample, for example 4096.")
    group_size = max(args.context_parallel_size, args.block_parallel_size)
    multiple = required_multiple(args.diffusion_block_size, group_size)
    if args.seq_length < multiple or args.seq_length % multiple:
        raise ValueError(length_error(args.seq_length, args.diffusion_block_size, group_size))


def check_sequence_parallel_rows(args: Namespace) -> None:
    """With sequence parallelism the rows of a rank divide by the tensor-parallel size."""
    if not args.sequence_parallel or args.tensor_model_parallel_size == 1:
        return
    group_size = max(args.context_parallel_size, args.block_parallel_size)
    replicated = args.context_parallel_size == 1 and args.block_parallel_size > 1
    chunks = args.seq_length // group_size
    rows = num_views(args) * chunks + (args.seq_length if replicated else chunks)
    if rows % args.tensor_model_parallel_size:
        multiple = group_size * args.tensor_model_parallel_size * args.diffusion_block_size * 2
        raise ValueError(
            f"--sequence-parallel splits the {rows} rows that a rank holds of --seq-length {args.seq_length} over "
            f"--tensor-model-parallel-size {args.tensor_model_parallel_size}, which does not divide them; a multiple "
            f"of {multiple} works, for example --seq-length {-(-args.seq_length // multiple) * multiple}."
        )


def check_dropout(args: Namespace, given: frozenset[str]) -> None:
    """Attention dropout is not supported: Megatron's default of 0.1 is turned off, a value that was given refused."""
    if "--attention-dropout" in given and args.attention_dropout:
        raise ValueError(
            f"--attention-dropout {args.attention_dropout} is not supported: tiles of one row run in different "
            "kernels and on different ranks, which cannot share a dropout mask; use --attention-dropout 0."
        )


def check_position_embedding(args: Namespace) -> None:
    """Position embeddings that can be given the true positions of both copies."""
    if args.position_embedding_type not in ("rope", "yarn", "learned_absolute", "none"):
        raise ValueError(
            f"--position-embedding-type {args.position_embedding_type} is not supported with block diffusion; use "
            "rope, yarn, learned_absolute or none."
        )


def check_query_scale(args: Namespace) -> None:
    """A scale of queries has a slope, and a length below which it is 1."""
    beta = args.query_scale_beta
    if beta is None:
        return
    if not 0.0 < beta < math.inf:
        raise ValueError(f"--query-scale-beta {beta} must be above 0; 0.1 is what the published models have.")
    if not args.yarn_original_max_position_embeddings:
        raise ValueError(
            f"--query-scale-beta {beta} needs --yarn-original-max-position-embeddings, the length below which the "
            "scale is 1; for example 16384."
        )


def check_full_validation(args: Namespace) -> None:
    """Megatron 0.19.2 fails at the first evaluation of a whole validation set that is not in a list."""
    if args.full_validation and args.multiple_validation_sets and (args.test_data_path or _shares_a_test_set(args)):
        raise ValueError(
            "--full-validation --multiple-validation-sets with a test set ends Megatron 0.19 after training; leave "
            "the test set out, for example --split 99,1,0."
        )
    if args.full_validation and not args.multiple_validation_sets:
        raise ValueError(
            "--full-validation without --multiple-validation-sets ends Megatron 0.19 at its first evaluation; give "
            "both, also for a single validation set, and no test set (--split 99,1,0)."
        )


def check_evaluation_interval(args: Namespace) -> None:
    """Megatron divides by `--eval-interval`, also where nothing is evaluated."""
    if args.eval_interval is None and not args.full_validation and not args.skip_train:
        raise ValueError(
            "--eval-interval is not given: Megatron counts evaluations by it, also with --eval-iters 0; for example "
            "--eval-interval 1000."
        )


def _shares_a_test_set(args: Namespace) -> bool:
    """Whether `--split` gives a test set a share (its default does)."""
    uses_split = args.data_path is not None or args.data_args_path is not None
    shares = re.findall(r"[.0-9]+", args.split or "969,30,1")  # as Megatron reads it
    return uses_split and len(shares) > 2 and float(shares[2]) > 0


def check_replicated_router(args: Namespace) -> None:
    """With pure BP every clean token is on all ranks: a router may not count tokens for a loss or a limit.

    What each token's own experts compute is exact: gradients enter at rows that count on one rank only.
    """
    size = args.block_parallel_size
    if not args.num_experts or size == 1 or args.context_parallel_size > 1:
        return
    balancing = set(args.moe_router_load_balancing_type) & {"sinkhorn", "quantile_balancing"}
    coefficients = args.moe_aux_loss_coeff
    any_auxiliary = any(coefficients) if isinstance(coefficients, list) else bool(coefficients)
    counting = {
        f"--moe-router-load-balancing-type {' '.join(balancing)}": bool(balancing),
        f"--moe-aux-loss-coeff {coefficients}": any_auxiliary,
        f"--moe-z-loss-coeff {args.moe_z_loss_coeff}": bool(args.moe_z_loss_coeff),
        f"--moe-expert-capacity-factor {args.moe_expert_capacity_factor}": args.moe_expert_capacity_factor is not None,
        "--moe-router-enable-expert-bias": args.moe_router_enable_expert_bias,
    }
    for flag, is_on in counting.items():
        if is_on:
            raise ValueError(
                f"{flag} counts the router's tokens, of which --block-parallel-size {size} alone holds every clean "
                f"one on {size} ranks; use CSBP (--context-parallel-size {size} as well), or leave the flag out."
            )


def check_unsupported(args: Namespace) -> None:
    """Refuse by name what would be dropped or computed wrongly."""
    for feature in UNSUPPORTED:
        value = getattr(args, feature.name, None)
        if not feature.is_off(value):
            shown = "" if value is True else f" {getattr(value, 'name', value)}"
            raise ValueError(
                f"{feature.flag}{shown} is not supported with --diffusion-block-size: {feature.reason}; "
                f"{feature.instead}."
            )


def check_vocabulary(args: Namespace, eod_token_id: int | None = None) -> None:
    """The mask id lies in the padded vocabulary and is not the end of a document. Call once the tokenizer is built."""
    if args.mask_token_id == eod_token_id:
        raise ValueError(
            f"--mask-token-id {args.mask_token_id} is the tokenizer's end of a document, which is data; use an id "
            "that the tokenizer never produces, also one in the padding of the vocabulary."
        )
    size = args.padded_vocab_size
    if size is not None and args.mask_token_id >= size:
        raise ValueError(
            f"--mask-token-id {args.mask_token_id} is outside the padded vocabulary of {size} tokens; use an id below "
            f"{size} that the tokenizer never produces, or a larger --make-vocab-size-divisible-by."
        )
