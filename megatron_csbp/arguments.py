# SPDX-License-Identifier: Apache-2.0
"""The flags of this package, and what they change among Megatron's own arguments.

Imports nothing of Megatron: the entries read some of these flags before Megatron may be imported.
"""

import argparse
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import lru_cache

from megatron_csbp import megatron_delta_net, megatron_model
from megatron_csbp.check_mode import add_check_mode_argument
from megatron_csbp.configuration.argument_rules import check_before_megatron
from megatron_csbp.configuration.changes import Change, Changes
from megatron_csbp.configuration.diffusion_arguments import (
    add_geometry_arguments,
    add_objective_arguments,
    add_packing_arguments,
)
from megatron_csbp.configuration.objective_flags import fill_objective_defaults
from megatron_csbp.configuration.performance_arguments import add_performance_arguments
from megatron_csbp.transformer.geometry.layer_plans import LayerPlans, PlanKey, layer_plans
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import BlockAssignment, Scheme, Sharding, resolve_scheme
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask, WindowAnchor

BACKENDS = ("auto", "transformer_engine", "torch", "flex", "hybrid")
DEVICES = ("auto", "cpu", "cuda")

type _Group = ArgumentParser | argparse._ArgumentGroup


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add this package's flags to Megatron's parser, in a group of their own (an `extra_args_provider`)."""
    group = parser.add_argument_group("block diffusion (megatron_csbp)")
    group.add_argument(
        "--block-parallel-size",
        "--bp-size",
        type=int,
        default=1,
        help="Ranks that share the diffusion blocks of a sequence. They are the ranks of --context-parallel-size: "
        "equal sizes give CSBP, this one alone pure block parallelism (clean copy on every rank).",
    )
    group.add_argument(
        "--diffusion-block-size",
        type=int,
        default=None,
        help="Tokens in a diffusion block. Turns block-diffusion training on; without it this is plain Megatron.",
    )
    add_geometry_arguments(group)
    group.add_argument(
        "--mask-token-id",
        type=int,
        default=None,
        help="Token id that stands for a corrupted token, which must lie in the padded vocabulary and may not occur "
        "in the training data. Default: the tokenizer's own mask token.",
    )
    add_objective_arguments(group)
    group.add_argument(
        "--block-assignment",
        choices=[str(choice) for choice in BlockAssignment],
        default=str(BlockAssignment.DUAL_END),
        help="Which chunks a rank owns. dual-end balances the work; contiguous is for ablation.",
    )
    group.add_argument(
        "--query-scale-beta",
        type=float,
        default=None,
        metavar="BETA",
        help="Scale the query at position p by 1 + BETA ln(1 + floor(p / T)), T being "
        "--yarn-original-max-position-embeddings (Llama 4; 0.1 for Nemotron-Labs-Diffusion). Default: no scale.",
    )
    group.add_argument(
        "--csbp-attention-backend",
        choices=BACKENDS,
        default="auto",
        help="Kernels of the block-diffusion attention. auto is torch on a CPU; on CUDA it is transformer_engine "
        "where that is installed and --attention-backend leaves its fused attention on, and else torch; in short "
        "sequences hybrid, which is flex for local keys and one of these for gathered ones. The start summary says "
        "which, and why. The choice is tested before the first step.",
    )
    add_packing_arguments(group)
    add_performance_arguments(group)
    add_device_argument(group)
    add_check_mode_argument(group)
    _add_measuring_arguments(group)
    return parser


def _add_measuring_arguments(group: _Group) -> None:
    """Add what a run measures about itself."""
    group.add_argument(
        "--csbp-ledger",
        metavar="FILE",
        default=None,
        help="Append to FILE, for every iteration, a JSON line of the bytes that the attention's collectives moved, "
        "by layer, copy and pass. Each rank has a file of its own: NAME.rank3.jsonl on rank 3, for NAME.jsonl. The "
        "run ends with a table of measured bytes against the closed form.",
    )
    group.add_argument(
        "--csbp-timing",
        action="store_true",
        help="Log at every --log-interval how long computation stood still for the attention's collectives (timer "
        "csbp-exposed-communication, over all ranks, also in TensorBoard). On CUDA the host then waits for the device "
        "once in an iteration, and with CUDA_DEVICE_MAX_CONNECTIONS=1 timing events may hold up what they time; "
        "megatron_csbp.tools.exposed_time takes the figure from a profiler's trace.",
    )


def add_device_argument(parser: _Group) -> None:
    """Add `--device`, which the entries read before Megatron is imported."""
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default="auto",
        help="auto: the CPU runtime only if there is no CUDA device. cpu: always, for tests and debugging.",
    )


def read_device(argv: Sequence[str]) -> str:
    """Return the value of `--device` in a command line, without looking at any other flag."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    add_device_argument(parser)
    device: str = parser.parse_known_args([arg for arg in argv if arg not in ("-h", "--help")])[0].device
    return device


def is_block_diffusion(args: Namespace) -> bool:
    """Return whether block-diffusion training is asked for."""
    return args.diffusion_block_size is not None


def has_delta_nets(args: Namespace) -> bool:
    """Return whether some layers of the model are gated delta nets."""
    return getattr(args, "experimental_attention_variant", None) == "gated_delta_net"


def prepare_before_validation(args: Namespace, given: frozenset[str]) -> list[Change]:
    """Check our rules and set what Megatron's own validation has to see. Call before Megatron's `validate_args`.

    Args:
        args: parsed arguments; changed in place.
        given: flags that the user gave, as written (`--attention-dropout`), on the command line or in a YAML file.

    Returns:
        The changes made, for the start summary.

    Raises:
        ValueError: a rule is broken; the message names the flag, the value, the rule and a value that works.
    """
    check_before_megatron(args, given)
    if not is_block_diffusion(args):
        return []
    args.diffusion_scheme = str(
        resolve_scheme(args.context_parallel_size, args.block_parallel_size, args.context_scheme)
    )
    fill_objective_defaults(args)
    changes = Changes(args)
    group_size = max(args.context_parallel_size, args.block_parallel_size)
    changes.set("context_parallel_size", group_size, "BP overlays Megatron's CP axis: both name the same ranks")
    changes.set(
        "calculate_per_token_loss", True, "ranks supervise different numbers of tokens: one global denominator"
    )
    changes.set(
        "create_attention_mask_in_dataloader", False, "the attention plan masks; a dense mask has 4 L^2 entries"
    )
    if "--attention-dropout" not in given:
        changes.set("attention_dropout", 0.0, "the tiles of a row cannot share a dropout mask; it is not supported")
    if "--hidden-dropout" not in given:
        changes.set("hidden_dropout", 0.0, "dropout differs between topologies; give the flag to keep it")
    return changes.made


def prepare_after_validation(args: Namespace) -> list[Change]:
    """Set the row count that Megatron's schedules have to see. Call after Megatron's `set_global_variables`.

    Args:
        args: validated arguments; changed in place: `clean_seq_length` keeps L, `seq_length` becomes the rows of the
            whole context group, (V+1)L or (V+P)L for pure BP, so that pipeline shapes are right.
    """
    if not is_block_diffusion(args):
        return []
    args.clean_seq_length = args.seq_length
    changes = Changes(args)
    rows = static_plans(args, rank=0).rows
    changes.set("seq_length", rows.num_rows * rows.sharding.group_size, "rows of all copies in one context group")
    return changes.made


def static_plans(args: Namespace, rank: int) -> LayerPlans:
    """Return rows and plans of one rank of the context group, for samples without a geometry of their own.

    Args:
        args: arguments after `prepare_after_validation` (or with `clean_seq_length` set).
        rank: rank in the context group.
    """
    return layer_plans(static_sample(args), sharding(args), rank)


def static_sample(args: Namespace) -> Sample:
    """Return the geometry of a sample: one document, all blocks active."""
    return _static_sample(args.clean_seq_length, args.diffusion_block_size, args.corrupted_views)


_static_sample = lru_cache(maxsize=8)(Sample)


def sharding(args: Namespace) -> Sharding:
    """Return how the flags spread a sample over the context group."""
    return Sharding(
        args.context_parallel_size,
        Scheme(args.diffusion_scheme),
        BlockAssignment(args.block_assignment),
        keeps_blocks_home=has_delta_nets(args),
    )


def masks(args: Namespace) -> tuple[Mask, ...]:
    """Return the masks of the model's attention layers: at most two, with and without `--window-size`."""
    numbers = megatron_delta_net.attention_layers(args)
    windows = dict.fromkeys(megatron_model.layer_window(args, number) for number in numbers)
    return tuple(layer_mask(args, window) for window in windows)


def layer_mask(args: Namespace, window: int | None) -> Mask:
    """Return the mask of layers with a window, or of those without."""
    return Mask(CleanAttention(args.clean_attention), window, WindowAnchor(args.window_anchor))


def plan_keys(args: Namespace) -> tuple[PlanKey, ...]:
    """Return what the model's layers ask a sample's plans for, in training and in evaluation.

    Args:
        args: arguments with `csbp_whole_last_layer` set.
    """
    keys = dict.fromkeys((mask, True) for mask in masks(args))
    if args.csbp_whole_last_layer is None:
        keys[layer_mask(args, megatron_model.layer_window(args, args.num_layers)), False] = None
    return tuple(keys)
