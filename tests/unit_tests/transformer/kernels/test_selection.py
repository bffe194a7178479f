# SPDX-License-Identifier: Apache-2.0
"""Which kernel a backend name and a device give, and what is refused."""

import pytest
import torch

from megatron_csbp.transformer.kernels import select_kernel

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("name, kernel", [("auto", "torch"), ("torch", "torch"), ("reference", "reference")])
def test_names_give_their_kernel_on_a_cpu(name: str, kernel: str) -> None:
    assert select_kernel(name, CPU).name == kernel


def test_an_unknown_name_is_refused_with_those_that_exist() -> None:
    with pytest.raises(
        ValueError, match=r"--csbp-attention-backend 'fast' is not a backend; use auto, torch or refer"
    ):
        select_kernel("fast", CPU)


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_a_device_without_a_kernel_is_refused_instead_of_falling_back(name: str) -> None:
    with pytest.raises(ValueError, match=f"--csbp-attention-backend {name} has no kernel for device 'cuda'"):
        select_kernel(name, CUDA)
