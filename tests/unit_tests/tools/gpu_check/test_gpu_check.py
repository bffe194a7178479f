# SPDX-License-Identifier: Apache-2.0
"""The GPU check in its reduced form on a CPU: that it runs, that it finds faults, and what it says without a GPU."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex_module

from megatron_csbp.tools.gpu_check import __main__ as gpu_check
from megatron_csbp.tools.gpu_check import timing, training_step, whole_group
from megatron_csbp.tools.gpu_check.settings import full_form, reduced_form
from megatron_csbp.tools.gpu_check.timing import time_backend, time_dense_flex
from megatron_csbp.tools.gpu_check.whole_group import allowed_mask, dense_attention, group_attention, random_problem
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import Scheme
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask
from megatron_csbp.transformer.kernels import AttentionKernel, flex
from megatron_csbp.transformer.kernels.flex import FlexKernel
from megatron_csbp.transformer.kernels.hybrid import HybridKernel
from megatron_csbp.transformer.kernels.torch_kernel import TorchCpuKernel
from megatron_csbp.transformer.streams import Start, Waitable
from tests.support import dense_oracle

ROOT = Path(__file__).parents[3]
SETTINGS = reduced_form(None)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_whole_script_runs_on_a_cpu_with_its_table_last(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "megatron_csbp.tools.gpu_check",
        "--device",
        "cpu",
        "--json",
        str(tmp_path / "found"),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=240, check=False
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert run.stdout.splitlines()[-1].startswith("gpu_check: no error in")
    found = json.loads((tmp_path / "found").read_text())
    assert found["errors"] == []
    assert {(row["scheme"], row["group_size"], row["head_groups"]) for row in found["accuracy"]} == {
        ("one rank", 1, 1),
        ("CP", 2, 1),
        ("CP", 2, 2),
        ("BP", 2, 1),
        ("CSBP", 2, 1),
        ("CSBP", 4, 1),
        ("CSBP", 4, 2),
    }
    assert all(0 < row["ratio"] <= 2 for row in found["accuracy"])
    assert {row["what"] for row in found["timings"]} == {
        "tiles: local full",
        "tiles: local causal",
        "tiles: gathered full",
        "whole CSBP rank",
        "whole sequence, one rank",
        "plain causal attention of equal work",
    }
    assert all(row["forward_ms"] > 0 and row["backward_ms"] > 0 for row in found["timings"])
    assert 4 < found["training"]["loss"] < 7  # the logarithm of 188 tokens is 5.2


def test_without_a_gpu_it_says_what_is_missing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is here: what is said without one is not checked")
    assert gpu_check.main(["--json", str(tmp_path / "found")]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "found").exists()


class Coarse(TorchCpuKernel):
    """Attention with an output that is off in one row."""

    def forward(
        self, query_GTND: Tensor, key_GUKD: Tensor, value_GUKD: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse = super().forward(query_GTND, key_GUKD, value_GUKD, causal=causal, scale=scale)
        return out.index_fill(1, torch.tensor([0]), self.value), lse

    value = 1.0


@pytest.mark.parametrize("value", [1.0, torch.nan])
def test_an_inaccurate_backend_is_an_error(
    value: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kernel = Coarse()
    kernel.value = value
    monkeypatch.setattr(gpu_check, "checked_kernel", lambda *args: kernel)
    assert gpu_check.main(["--device", "cpu", "--skip-training", "--json", str(tmp_path / "found")]) == 1
    printed = capsys.readouterr().out
    assert "WRONG" in printed
    assert "times as much as dense bf16; 2 is allowed" in printed
    assert len(json.loads((tmp_path / "found").read_text())["errors"]) == 14


def test_a_backend_that_fails_is_an_error_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def checked(name: str, *args: object) -> AttentionKernel:
        if name == "flex":
            raise ValueError("--csbp-attention-backend flex is wrong on this machine")
        return TorchCpuKernel()

    monkeypatch.setattr(gpu_check, "checked_kernel", checked)
    arguments = [
        "--device",
        "cpu",
        "--skip-training",
        "--json",
        str(tmp_path / "found"),
        "--backends",
        "flex",
        "torch",
    ]
    assert gpu_check.main(arguments) == 1
    found = json.loads((tmp_path / "found").read_text())
    assert found["errors"] == ["flex: ValueError: --csbp-attention-backend flex is wrong on this machine"]
    assert found["accuracy"]
    assert "gpu_check: 1 error(s)" in capsys.readouterr().out.splitlines()[-1]


def test_a_training_step_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        training_step.subprocess,
        "run",
        lambda *args, **kwargs: subprocess.CompletedProcess([], 1, stdout="lm loss: 5.3E+00", stderr="out of memory"),
    )
    step = training_step.training_step(SETTINGS)
    assert (step.loss, "out of memory" in step.error) == (5.3, True)


@pytest.mark.parametrize("clean", CleanAttention)
def test_its_own_dense_attention_is_that_of_the_tests(clean: CleanAttention) -> None:
    problem = random_problem(replace(SETTINGS, accuracy_length=32)).to(torch.float64)
    sample, mask = Sample(32, 8), Mask(clean)
    assert torch.equal(allowed_mask(32, 8, clean), dense_oracle.allowed_mask(sample, mask))
    ours = dense_attention(problem, 8, clean)
    theirs = dense_oracle.dense_attention(
        dense_oracle.Problem(problem.query, problem.key, problem.value, problem.grad_out), sample, mask
    )
    for name, got in (("out", ours.out), ("dq", ours.grad_query), ("dk", ours.grad_key), ("dv", ours.grad_value)):
        torch.testing.assert_close(got, getattr(theirs, name), atol=1e-12, rtol=1e-12)


class LateNetwork:
    """A side stream on which nothing happens before it is waited for."""

    def launch(self, start: Start, tensors: Sequence[Tensor]) -> Sequence[Waitable]:
        return (SimpleNamespace(wait=lambda: start(False)),)


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("head_groups", [1, 2])
@pytest.mark.parametrize(
    "scheme", [Scheme.CONTEXT_PARALLEL, Scheme.BLOCK_PARALLEL, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL]
)
def test_a_group_in_one_process_is_the_whole_sequence(
    scheme: Scheme, head_groups: int, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_late:
        monkeypatch.setattr(whole_group, "side_stream", lambda device: LateNetwork())
    problem = random_problem(SETTINGS).to(torch.float64)
    clean = CleanAttention.TOKEN_CAUSAL
    result = group_attention(problem, scheme, 4, 8, clean, TorchCpuKernel(), head_groups)
    errors = result.max_errors(dense_attention(problem, 8, clean))
    assert {part: error for part, error in errors.items() if not error <= 2e-6} == {}  # it adds up in fp32


@pytest.mark.parametrize("length", [64, 16384, 32768, 65536, 131072])
def test_the_yardstick_is_a_length_for_which_backends_take_their_fast_path(length: int) -> None:
    class Recording(TorchCpuKernel):
        rows = 0

        def forward(self, query: Any, *rest: Any, **options: Any) -> Any:
            self.rows = query.shape[1]
            return query, None

        def backward(self, *tensors: Any, **options: Any) -> Any:
            return None

    kernel, plan = Recording(), timing._plan(SETTINGS, length, SETTINGS.timing_group_size)
    timing._time_causal(kernel, SETTINGS, plan)
    assert kernel.rows % 128 == 0
    if length > 64:
        assert kernel.rows * (kernel.rows + 1) / 2 == pytest.approx(plan.num_pairs, rel=0.02)


class FlexOnCpu(TorchCpuKernel, FlexKernel):
    """FlexAttention for local tiles, the CPU operator for the others."""

    name = "flex"


@pytest.mark.parametrize("kernel", [FlexOnCpu(), HybridKernel(FlexOnCpu(), TorchCpuKernel())], ids=["flex", "hybrid"])
def test_a_backend_with_flex_attention_is_timed_in_one_call_under_its_own_name_and_on_both_copies(
    kernel: AttentionKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex, "compiled_flex_attention", lambda: flex_module.flex_attention)
    monkeypatch.setattr(timing, "compiled_flex_attention", lambda: flex_module.flex_attention)
    monkeypatch.setattr(flex_module, "_validate_device", lambda *tensors: None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        timings = [*time_backend(kernel, SETTINGS, 64), time_dense_flex(SETTINGS, 64)]
    torch._dynamo.reset()
    assert [(t.what, t.backend, t.group_size) for t in timings] == [
        ("local tiles in one call", kernel.name, 2),
        ("whole CSBP rank", kernel.name, 2),
        ("FlexAttention on both copies", "flex", 1),
    ]


def test_the_full_form_has_the_sizes_that_the_documentation_names() -> None:
    settings = full_form(torch.device("cuda", 0), None)
    heads = settings.timing_heads
    assert (heads.num_query_heads, heads.num_key_value_heads, heads.head_dim) == (32, 8, 128)
    assert settings.timing_lengths == (16384, 32768, 65536, 131072)
    assert settings.group_sizes == (2, 4, 8)
