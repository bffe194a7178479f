# SPDX-License-Identifier: Apache-2.0
"""The adapter of fla's kernels: exact with a stand-in for its function, whose real signatures take our arguments."""

import importlib.util
import inspect
from typing import Any

import pytest
import torch

from megatron_csbp.transformer.delta_net import fla_kernel, kernels
from megatron_csbp.transformer.delta_net.fla_kernel import FlaDeltaRule
from megatron_csbp.transformer.delta_net.kernels import select_delta_kernel
from megatron_csbp.transformer.delta_net.torch_kernel import TorchDeltaRule
from tests.support.delta_oracle import DeltaCase, run_on_group, sequential
from tests.support.fla_signatures import PARAMETERS, stand_in
from tests.support.simulated_group import SimulatedCollectives

CASES = [
    DeltaCase(group_size=1, blocks_per_chunk=3),
    DeltaCase(group_size=4, views=2, batch=2, document_blocks=(0, 1, 5, 9, 12, 19)),
    DeltaCase(group_size=2, block_size=20, blocks_per_chunk=2, slow_decay=False, state_bytes=1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_all_gradients_equal_the_recurrence(
    case: DeltaCase, simulated_collectives: SimulatedCollectives, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fla_kernel, "chunk_gated_delta_rule", lambda: stand_in)
    problem = case.problem()
    errors = run_on_group(case, problem, FlaDeltaRule()).errors(sequential(case, problem))
    assert {part: error for part, error in errors.items() if not error <= 1e-11} == {}


def names_passed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the names of the arguments that the adapter passes."""
    passed: set[str] = set()

    def note(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        passed.update(arguments)
        return stand_in(**arguments)

    monkeypatch.setattr(fla_kernel, "chunk_gated_delta_rule", lambda: note)
    case = DeltaCase(group_size=1)
    run_on_group(case, case.problem(), FlaDeltaRule())
    return passed


@pytest.mark.parametrize("version", PARAMETERS)
def test_every_argument_is_named_in_the_signatures_of_fla(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is not would be swallowed by **kwargs."""
    assert names_passed(monkeypatch) - set(PARAMETERS[version].split()) == set()


@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="fla-core is not installed: its real signature")
def test_every_argument_is_named_in_the_installed_fla(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = inspect.signature(fla_kernel.chunk_gated_delta_rule()).parameters
    assert names_passed(monkeypatch) - set(parameters) == set()


def test_a_cpu_gets_pytorch_and_cuda_gets_fla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "fla_version", lambda: "0.6.0")
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert isinstance(select_delta_kernel("auto", cpu), TorchDeltaRule)
    assert isinstance(select_delta_kernel("auto", cuda), FlaDeltaRule)
    assert isinstance(select_delta_kernel("auto", cuda, deterministic=True), TorchDeltaRule)
    assert isinstance(select_delta_kernel("torch", cuda), TorchDeltaRule)


@pytest.mark.parametrize(
    "backend, device, deterministic, message",
    [
        ("fla", "cpu", False, r"--csbp-delta-net-backend fla needs a CUDA device; use auto or torch"),
        ("fla", "cuda", True, r"--csbp-delta-net-backend fla is not deterministic; .*use auto or torch"),
        ("auto", "cuda", False, r"fla-core, which is not installed .*--csbp-delta-net-backend torch"),
    ],
)
def test_what_cannot_run_is_refused_by_name(
    backend: str, device: str, deterministic: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "fla_version", lambda: None)
    with pytest.raises(ValueError, match=message):
        select_delta_kernel(backend, torch.device(device), deterministic)
