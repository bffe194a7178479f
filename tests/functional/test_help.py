# SPDX-License-Identifier: Apache-2.0
"""`--help` of the entry."""

from tests.support.megatron_run import Ranks


def test_help_lists_megatrons_flags_and_ours_in_a_group_of_their_own(ranks: Ranks) -> None:
    run = ranks.train(["--help"]).check()
    assert "--tensor-model-parallel-size" in run.output
    ours = run.output.partition("block diffusion (megatron_csbp):")[2]
    assert "--block-parallel-size BLOCK_PARALLEL_SIZE, --bp-size BLOCK_PARALLEL_SIZE" in ours
    assert "--mask-token-id" in ours
