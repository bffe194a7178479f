# SPDX-License-Identifier: Apache-2.0
"""The training objective that the flags describe. Imports nothing of Megatron."""

from argparse import Namespace

from megatron_csbp.objectives import OBJECTIVES, Objective, ObjectiveConfig, build_objective
from megatron_csbp.transformer.geometry.visibility import CleanAttention


def objective_from_args(args: Namespace) -> Objective:
    """Return the training objective that the flags describe.

    Args:
        args: arguments; the mask token is known once the tokenizer is built.

    Raises:
        ValueError: a flag is out of its range, or does not fit the objective.
    """
    assert args.mask_token_id is not None, "fill_mask_token has filled it in"
    return _objective(args, args.mask_token_id)


def _objective(args: Namespace, mask_token_id: int) -> Objective:
    return build_objective(
        ObjectiveConfig(
            name=args.diffusion_objective,
            mask_token_id=mask_token_id,
            noise_schedule=args.noise_schedule,
            noise_eps=args.noise_eps,
            diffusion_loss_weight=args.diffusion_loss_weight,
            ar_loss_weight=args.ar_loss_weight,
            num_views=args.corrupted_views,
        )
    )


def check_objective(args: Namespace) -> None:
    """The objective takes its flags, and no clean row sees its target."""
    objective = _objective(args, args.mask_token_id or 0)  # which token it is does not matter here
    if objective.loss_on_clean_rows and args.clean_attention == CleanAttention.BLOCK_CAUSAL:
        weight = objective.default_ar_loss_weight if args.ar_loss_weight is None else args.ar_loss_weight
        raise ValueError(
            f"--clean-attention block-causal with --ar-loss-weight {weight}: a clean token would see the next token, "
            "which the autoregressive loss asks it to predict; use --clean-attention token-causal or --ar-loss-weight "
            "0."
        )


def fill_objective_defaults(args: Namespace) -> None:
    """Fill in what the objective trains with where a flag is not given: views, clean attention, loss weights."""
    objective = OBJECTIVES[args.diffusion_objective]
    args.corrupted_views = num_views(args)
    args.clean_attention = args.clean_attention or str(objective.default_clean_attention)
    if args.diffusion_loss_weight is None:
        args.diffusion_loss_weight = objective.default_diffusion_loss_weight
    if args.ar_loss_weight is None:
        args.ar_loss_weight = objective.default_ar_loss_weight


def num_views(args: Namespace) -> int:
    """Return V, the corrupted copies of a sample, by flag or by the objective's default."""
    default = OBJECTIVES[args.diffusion_objective].default_num_views
    views: int = default if args.corrupted_views is None else args.corrupted_views
    return views
