# SPDX-License-Identifier: Apache-2.0
"""Every tile of a plan is timed on its own, and stands beside the model."""

from megatron_csbp.tools.gpu_check.settings import reduced_form
from megatron_csbp.tools.gpu_check.tile_table import time_each_tile
from megatron_csbp.transformer.kernels.torch_kernel import TorchCpuKernel


def test_each_tile_of_the_last_rank_has_a_line_with_times_and_the_model() -> None:
    settings = reduced_form(None)
    timings = list(time_each_tile(TorchCpuKernel(), settings, 128))
    # P = 2, chunks of 32, blocks of 8: diagonals, two levels of the staircase for each copy's rows, two prefixes.
    assert [timing.tile for timing in timings].count("gathered full") == 2
    assert [timing.tile for timing in timings].count("local causal") == 1
    assert {timing.length for timing in timings} == {128}
    for timing in timings:
        assert timing.forward_us > 0
        assert timing.backward_us > 0
        assert timing.modelled_forward_us > 0
        assert timing.modelled_backward_us >= timing.modelled_forward_us
