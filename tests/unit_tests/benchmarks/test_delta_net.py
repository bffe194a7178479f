# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of gated delta nets compares is the same work."""

import torch

from benchmarks.delta_net import Times, block_diffusion, inputs, measure, stock
from megatron_csbp.transformer.geometry.layer_plans import rank_rows
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import Scheme, Sharding


def test_both_sides_compute_the_same_clean_rows() -> None:
    clean = torch.from_numpy(~rank_rows(Sample(128, 32), Sharding(1, Scheme.SINGLE), 0).is_corrupted)
    both = inputs(256)
    rows = [tensor[clean] for tensor in both[:3]]
    with torch.no_grad():
        found = block_diffusion(128, 32, both)()[clean].transpose(0, 1)
        expected = stock([*rows, both[3]])()
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_times_are_the_least_of_the_repeats() -> None:
    rows = torch.ones(4, requires_grad=True)
    (times,) = measure([lambda: rows * 2], repeats=2)
    assert isinstance(times, Times)
    assert 0 <= times.forward <= times.both
