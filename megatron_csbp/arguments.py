# SPDX-License-Identifier: Apache-2.0
"""The flags of this package, and what they change among Megatron's own arguments.

Imports nothing of Megatron: the entries read some of these flags before Megatron may be imported.
"""

import argparse
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import lru_cache

from megatron_csbp import megatron_compat
from megatron_csbp.check_mode import add_check_mode_argument
from megatron_csbp.configuration.argument_rules import check_before_megatron
from megatron_csbp.configuration.changes import Change
from megatron_csbp.configuration.objective_flags import fill_objective_defaults
from megatron_csbp.configuration.performance_arguments import add_performance_arguments
from megatron_csbp.objectives import OBJECTIVES
from megatron_csbp.objectives.noise_schedules import NOISE_SCHEDULES
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
    group.add_argument(
        "--context-scheme",
        choices=["cp"],
        default=None,
        help="cp: with --context-parallel-size alone, run the context-parallel baseline, which exchanges corrupted "
        "keys and values as well. It has to be asked for by name, since a forgotten --bp-size would look the same.",
    )
    group.add_argument(
        "--corrupted-views",
        type=int,
        default=None,
        metavar="V",
        help="Corrupted copies of every sample in one step, each with a noise of its own, that share one clean copy: "
        "V+1 rows for each token instead of 2V. Default: 2 for fast-dllm-v2, else 1.",
    )
    group.add_argument(
        "--window-anchor",
        choices=[str(choice) for choice in WindowAnchor],
        default=str(WindowAnchor.POSITION),
        help="What the window of a corrupted row is counted from in layers with --window-size: its own position, as "
        "Megatron's windows are, or its block's first position, as DiffusionGemma's (all rows of a block then see the "
        "same clean tokens).",
    )
    group.add_argument(
        "--mask-token-id",
        type=int,
        default=None,
        help="Token id that stands for a corrupted token. Must lie in the padded vocabulary.",
    )
    _add_objective_arguments(group)
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
    _add_packing_arguments(group)
    add_performance_arguments(group)
    add_device_argument(group)
    add_check_mode_argument(group)
    _add_measuring_arguments(group)
    return parser


def _add_objective_arguments(group: _Group) -> None:
    """Add what is trained: the loss, the clean mask that goes with it, and the noise."""
    group.add_argument(
        "--diffusion-objective",
        choices=list(OBJECTIVES),
        default="block-diffusion",
        help="block-diffusion: BD3-LM's NELBO, one noise level per block, over supervised tokens. nemotron: NVIDIA's "
        "joint diffusion and autoregressive loss, one noise level per sequence. fast-dllm-v2: the published "
        "conversion of an autoregressive model, two complementary views with shifted targets.",
    )
    group.add_argument(
        "--clean-attention",
        choices=[str(choice) for choice in CleanAttention],
        default=None,
        help="What a clean token sees: earlier clean tokens, or its whole block and earlier blocks. Default: "
        "block-causal for block-diffusion, token-causal for nemotron.",
    )
    group.add_argument(
        "--diffusion-loss-weight",
        type=float,
        default=None,
        help="Weight of the diffusion term. Default: 1.0 for block-diffusion, 0.3 for nemotron.",
    )
    group.add_argument(
        "--ar-loss-weight",
        type=float,
        default=None,
        help="Weight of the next-token term on the clean copy. Default: 0 for block-diffusion, 1.0 for nemotron.",
    )
    group.add_argument(
        "--noise-schedule",
        choices=list(NOISE_SCHEDULES),
        default="log-linear",
        help="Chance that a token is corrupted, and its loss weight, as functions of the noise level t.",
    )
    group.add_argument("--noise-eps", type=float, default=1e-3, help="Smallest noise level: t lies in [eps, 1].")


def _add_packing_arguments(group: _Group) -> None:
    """Add what a sample is made of where it is not a stretch of one long text."""
    group.add_argument(
        "--pack-documents",
        action="store_true",
        help="Make samples of whole documents (or conversations) of --data-path, each at a block boundary: none sees "
        "another, and positions restart. For fine-tuning. A micro-batch is one sample.",
    )
    group.add_argument(
        "--loss-on",
        choices=["answers", "all"],
        default="answers",
        help="With --pack-documents: train on the tokens that preparation has marked as answers (all tokens, where it "
        "marked none), or on all.",
    )
    group.add_argument(
        "--long-documents",
        choices=["refuse", "cut"],
        default="refuse",
        help="With --pack-documents: what to do with documents that are longer than --seq-length.",
    )
    group.add_argument(
        "--csbp-all-blocks",
        action="store_true",
        help="With --pack-documents: give every block corrupted rows, also those in which no row carries loss. For "
        "ablation: it changes no loss and no gradient.",
    )


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
        "csbp-exposed-communication, over all ranks, also in TensorBoard) and clean tokens per second, which "
        "--log-throughput logs too. On CUDA the host then waits for the device once in an iteration, and with "
        "CUDA_DEVICE_MAX_CONNECTIONS=1 timing events may hold up what they time; megatron_csbp.tools.exposed_time "
        "takes the figure from a profiler's trace.",
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
    changes = _Changes(args)
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
    changes = _Changes(args)
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
    """Return the masks of the model's layers, at most two: with and without the window of `--window-size`."""
    numbers = range(1, args.num_layers + 1)
    windows = dict.fromkeys(megatron_compat.layer_window(args, number) for number in numbers)
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
        keys[layer_mask(args, megatron_compat.layer_window(args, args.num_layers)), False] = None
    return tuple(keys)


class _Changes:
    """Sets arguments and remembers what changed."""

    def __init__(self, args: Namespace) -> None:
        self.made: list[Change] = []
        self._args = args

    def set(self, name: str, value: object, reason: str) -> None:
        before = getattr(self._args, name)
        if before != value:
            self.made.append(Change(name, before, value, reason))
            setattr(self._args, name, value)
