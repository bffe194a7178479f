# SPDX-License-Identifier: Apache-2.0
"""What the flags say, and what they change among Megatron's arguments."""

import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

import megatron_csbp
from megatron_csbp.arguments import (
    Change,
    is_block_diffusion,
    prepare_after_validation,
    prepare_before_validation,
    read_device,
    static_plans,
)
from megatron_csbp.transformer.geometry.scheme import BlockAssignment, Scheme
from tests.support.megatron_arguments import VALID, parse, parser


def prepared(flags: str) -> tuple[Namespace, list[Change]]:
    args, given = parse(f"{VALID} {flags}")
    return args, prepare_before_validation(args, given)


def test_nothing_of_megatron_is_imported_until_a_run_starts() -> None:
    """The CPU runtime has to come first, so what is imported before it may import Megatron inside functions only."""
    edges = ", ".join(f"megatron_csbp.{path.stem}" for path in Path(megatron_csbp.__path__[0]).glob("megatron_*.py"))
    program = (
        f"import sys; import megatron_csbp.arguments, megatron_csbp.cpu_runtime, {edges};"
        "print([name for name in sys.modules if name.split('.')[0] == 'megatron'])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_help_groups_our_flags() -> None:
    groups = {group.title: group for group in parser()._action_groups}
    ours = {
        flag for action in groups["block diffusion (megatron_csbp)"]._group_actions for flag in action.option_strings
    }
    assert {"--block-parallel-size", "--bp-size", "--diffusion-block-size", "--mask-token-id", "--device"} <= ours
    assert "--context-parallel-size" not in ours


def test_short_and_long_names_are_one_flag() -> None:
    assert parse("--bp-size 4")[0].block_parallel_size == parse("--block-parallel-size 4")[0].block_parallel_size == 4


@pytest.mark.parametrize(
    "flags, scheme, group_size",
    [
        ("", Scheme.SINGLE, 1),
        ("--context-parallel-size 4 --context-scheme cp", Scheme.CONTEXT_PARALLEL, 4),
        ("--bp-size 4", Scheme.BLOCK_PARALLEL, 4),
        ("--bp-size 4 --context-parallel-size 4", Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL, 4),
    ],
)
def test_the_pair_of_sizes_decides_the_scheme(flags: str, scheme: Scheme, group_size: int) -> None:
    args, _ = prepared(flags)
    assert args.diffusion_scheme == scheme
    assert args.context_parallel_size == group_size


def test_pure_bp_overlays_megatrons_context_parallel_axis_and_says_so() -> None:
    _, changes = prepared("--bp-size 4")
    assert ("context_parallel_size", 1, 4) in [(change.name, change.before, change.after) for change in changes]
    _, changes = prepared("--bp-size 4 --context-parallel-size 4")
    assert "context_parallel_size" not in [change.name for change in changes]


def test_every_change_is_reported_with_a_reason() -> None:
    before = vars(parse(VALID)[0])
    args, changes = prepared("")
    assert {change.name: (change.before, change.after) for change in changes} == {
        name: (before[name], getattr(args, name))
        for name in before
        if before[name] != getattr(args, name) and before[name] is not None
    }
    assert all(change.reason for change in changes)
    assert args.calculate_per_token_loss
    assert not args.create_attention_mask_in_dataloader


def test_dropout_is_off_unless_it_is_asked_for() -> None:
    args, changes = prepared("")
    assert args.hidden_dropout == args.attention_dropout == 0.0
    assert {"hidden_dropout", "attention_dropout"} <= {change.name for change in changes}
    args, changes = prepared("--hidden-dropout 0.2")
    assert args.hidden_dropout == 0.2
    assert "hidden_dropout" not in {change.name for change in changes}


@pytest.mark.parametrize(
    "flags, clean_attention, diffusion, autoregressive",
    [
        ("", "block-causal", 1.0, 0.0),
        ("--diffusion-objective nemotron", "token-causal", 0.3, 1.0),
        ("--clean-attention token-causal", "token-causal", 1.0, 0.0),
        ("--diffusion-objective nemotron --diffusion-loss-weight 2 --ar-loss-weight 0.5", "token-causal", 2.0, 0.5),
    ],
)
def test_defaults_are_those_of_the_objective(
    flags: str, clean_attention: str, diffusion: float, autoregressive: float
) -> None:
    args, _ = prepared(flags)
    assert args.clean_attention == clean_attention
    assert (args.diffusion_loss_weight, args.ar_loss_weight) == (diffusion, autoregressive)


@pytest.mark.parametrize(
    "flags, rows",
    [
        ("", 128),
        ("--bp-size 2 --context-parallel-size 2", 128),
        ("--context-parallel-size 2 --context-scheme cp", 128),
        ("--bp-size 2", 192),
        ("--corrupted-views 3", 256),
        ("--bp-size 2 --context-parallel-size 2 --corrupted-views 2", 192),
        ("--bp-size 2 --corrupted-views 2", 256),
    ],
)
def test_megatron_sees_the_rows_of_the_context_group(flags: str, rows: int) -> None:
    args, _ = prepared(flags)
    changes = prepare_after_validation(args)
    assert args.clean_seq_length == 64
    assert args.seq_length == rows
    assert [(change.name, change.before, change.after) for change in changes] == [("seq_length", 64, rows)]
    assert static_plans(args, rank=0).rows.num_rows == rows // args.context_parallel_size


def test_rows_follow_the_flags() -> None:
    args, _ = prepared("--bp-size 2 --context-parallel-size 2 --block-assignment contiguous")
    prepare_after_validation(args)
    rows = static_plans(args, rank=1).rows
    assert (rows.rank, rows.sharding.group_size, rows.sample.block_size, rows.sample.num_views) == (1, 2, 8, 1)
    assert rows.sharding.assignment is BlockAssignment.CONTIGUOUS
    assert rows.sharding.scheme is Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL


def test_without_a_block_size_nothing_changes() -> None:
    args, given = parse("--seq-length 63 --context-parallel-size 2")
    before = dict(vars(args))
    assert not is_block_diffusion(args)
    assert prepare_before_validation(args, given) == prepare_after_validation(args) == []
    assert vars(args) == before


@pytest.mark.parametrize(
    "argv, device",
    [([], "auto"), (["--seq-length", "8", "--device", "cpu"], "cpu"), (["--device=cuda", "-h"], "cuda")],
)
def test_the_device_is_read_before_megatron_parses(argv: list[str], device: str) -> None:
    assert read_device(argv) == device
