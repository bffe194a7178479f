# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the attention tests."""

from collections.abc import Iterator

import pytest
import torch

from tests.support.simulated_group import RenamedCollectives, SimulatedCollectives, use_simulated


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from more threads, and simulated ranks are threads themselves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def simulated_collectives(monkeypatch: pytest.MonkeyPatch) -> SimulatedCollectives:
    """Collectives over threads in place of torch.distributed, under the real exchange."""
    simulated = RenamedCollectives()
    use_simulated(simulated, monkeypatch)
    return simulated
