# SPDX-License-Identifier: Apache-2.0
"""Packed documents: which flags they exclude, and what they change."""

import pytest

from megatron_csbp.configuration.own_geometries import check_own_geometries, prepare_own_geometries
from megatron_csbp.configuration.packing_rules import check_packing
from tests.support.megatron_arguments import VALID, parse

PACKED = f"{VALID} --pack-documents"


@pytest.mark.parametrize(
    "flags, said",
    [
        (f"{VALID} --loss-on all", "--loss-on given without --pack-documents"),
        (f"{VALID} --long-documents cut", "--long-documents given without --pack-documents"),
        (f"{PACKED} --mock-data", "--pack-documents with --mock-data"),
        (f"{PACKED} --eod-mask-loss", "--eod-mask-loss with --pack-documents"),
    ],
)
def test_flags_without_sense_are_refused(flags: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_packing(*parse(flags))


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--micro-batch-size 2", "--micro-batch-size 2: .* Use --micro-batch-size 1"),
        ("--eval-micro-batch-size 4", "--eval-micro-batch-size 4: .* Use --eval-micro-batch-size 1"),
        (
            "--num-experts 4 --pipeline-model-parallel-size 2",
            "--moe-token-dispatcher-type allgather .* Use --moe-token-dispatcher-type alltoall",
        ),
        (
            "--sequence-parallel --tensor-model-parallel-size 3",
            "--diffusion-block-size 8 must be a multiple of --tensor-model-parallel-size 3, for example 9",
        ),
    ],
)
def test_what_samples_of_their_own_sizes_exclude_is_refused(flags: str, said: str) -> None:
    args, _ = parse(f"{PACKED} --diffusion-block-size 8 --micro-batch-size 1 {flags}")
    with pytest.raises(ValueError, match=said):
        check_own_geometries(args)


def test_stages_tell_one_another_how_many_rows_and_the_summary_says_so() -> None:
    args, _ = parse(f"{PACKED} --micro-batch-size 1 --pipeline-model-parallel-size 2")
    args.variable_seq_lengths = False  # as Megatron's validation leaves it
    changes = {change.name: change.after for change in prepare_own_geometries(args)}
    assert changes == {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
    assert args.variable_seq_lengths
    assert args.moe_token_dispatcher_type == "alltoall"


def test_without_pipeline_nothing_is_changed() -> None:
    args, _ = parse(f"{PACKED} --micro-batch-size 1")
    before = dict(vars(args))
    assert prepare_own_geometries(args) == []
    assert vars(args) == before
