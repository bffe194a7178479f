# SPDX-License-Identifier: Apache-2.0
"""Saved and allocated bytes against what is known by hand."""

import pytest
import torch

from megatron_csbp.tools.memory_meter import AllocationMeter, SavedActivations

DEVICES = ["cpu", "meta"]


@pytest.mark.parametrize("device", DEVICES)
def test_a_saved_storage_counts_once_and_as_a_whole(device: str) -> None:
    rows = torch.zeros(100, 2, device=device, requires_grad=True)
    with SavedActivations() as saved:
        first = (rows[:10] * rows[10:20]).sum()  # two views of the leaf, 800 bytes in all
        second = (rows * 2).exp()  # saves its result
    assert saved.total_bytes == 1600
    assert sorted(saved.storages.values()) == [800, 800]
    (first + second.sum()).backward()


@pytest.mark.parametrize("device", DEVICES)
def test_storages_are_followed_until_they_are_freed(device: str) -> None:
    given = torch.zeros(1000, device=device)
    with AllocationMeter() as meter:
        first = given * 2  # 4,000 bytes
        view = first.view(10, 100)
        del first
        assert meter.live_bytes == 4000
        given.add_(1)
        second = torch.cat([view, view])  # 8,000 bytes
        del view
        assert meter.live_bytes == 8000
        third = second.to(torch.float64).sum()  # 16,000 bytes for a moment
        assert meter.live_bytes == 8000 + third.nbytes
    assert meter.peak_bytes == 8000 + 16000 + third.nbytes
    assert meter.largest_elements == 2000
    del second, third
    assert meter.live_bytes == 0


def test_what_a_backward_pass_allocates_counts_too() -> None:
    weight = torch.zeros(50, 50, requires_grad=True)
    with AllocationMeter() as meter:
        (weight @ weight).sum().backward()
    assert meter.peak_bytes > 2 * weight.nbytes
    assert weight.grad is not None
    assert meter.live_bytes == weight.grad.nbytes
