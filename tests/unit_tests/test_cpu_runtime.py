# SPDX-License-Identifier: Apache-2.0
"""The CPU runtime. What it does to a process is looked at from another one, so that this one stays as it is."""

import inspect
import json
import os
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._device import _device_constructors

from megatron_csbp import cpu_runtime
from megatron_csbp.cpu_runtime import installation
from megatron_csbp.cpu_runtime.device_arguments import MAKE_TENSORS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process finds that can import a (broken) Transformer Engine and runs three threads."""
    folder = tmp_path_factory.mktemp("packages")
    for package in ("transformer_engine", "transformer_engine/pytorch", "flash_attn"):
        (folder / package).mkdir()
        (folder / package / "__init__.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')")
    path = os.pathsep.join([str(ROOT), str(folder)])
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.cpu_runtime_probe"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-3000:]
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


def test_every_way_to_name_cuda_leads_to_the_cpu(probe: dict[str, Any]) -> None:
    """In threads, data workers and backward passes too."""
    assert set(probe["devices"].values()) == {"cpu"}, probe["devices"]


def test_tensors_without_memory_are_still_made_under_their_device(probe: dict[str, Any]) -> None:
    assert probe["made under meta"] == "meta"


def test_every_function_that_pytorch_itself_gives_a_device_to_is_replaced() -> None:
    """PyTorch's list is that of a device as a context; a function that a later version adds fails here by name."""
    replaced = {inspect.unwrap(getattr(owner, name)) for owner, names in MAKE_TENSORS.items() for name in names}
    # Not what this process keeps of it: a function that a library had in its place at the first call stays there.
    known = _device_constructors.__wrapped__()
    assert len(known) > 30
    assert {function.__name__ for function in known if function not in replaced} == set()


def test_a_move_to_the_cpu_copies_as_it_does_from_a_device(probe: dict[str, Any]) -> None:
    assert probe["copies"] == {"cpu": False, "to cpu": False, "cuda": True, "to own device": True}


def test_only_megatron_is_told_of_a_cuda_device(probe: dict[str, Any]) -> None:
    sees = probe["sees"]
    assert (sees["type here"], sees["type in megatron"]) == ("torch.FloatTensor", "torch.cuda.BFloat16Tensor")
    assert (sees["available here"], sees["available in megatron"]) == (False, True)
    assert (sees["count here"], sees["count in megatron"]) == (0, 1)


def test_users_read_that_the_device_is_a_cpu(probe: dict[str, Any]) -> None:
    assert probe["sees"]["name"].startswith("CPU")
    assert probe["sees"]["properties name"].startswith("CPU")
    assert (probe["device"], probe["reason"], probe["threads"]) == ("cpu", "--device cpu", 3)
    assert "resident set size" in " ".join(probe["notes"])


def test_functions_are_not_compiled(probe: dict[str, Any]) -> None:
    assert probe["sees"]["compiled"]
    assert probe["sees"]["compiled by decorator"]


def test_memory_figures_are_those_of_the_process(probe: dict[str, Any]) -> None:
    memory = probe["memory"]
    assert memory["during"] == pytest.approx(memory["independent"], rel=0.02)
    assert memory["during"] - memory["before"] == pytest.approx(200 * 2**20, rel=0.05)
    assert memory["peak"] >= memory["during"] - 2**20  # the kernel's count of pages may lag
    assert memory["peak in stats"] == memory["peak"]
    assert memory["peak after reset"] < memory["peak"] - 100 * 2**20
    assert memory["total"] == memory["independent total"]


def test_a_figure_that_is_not_known_is_no_number(probe: dict[str, Any]) -> None:
    assert probe["memory"]["count in stats"] != probe["memory"]["count in stats"]


def test_a_figure_that_a_cpu_does_not_have_is_refused_by_its_flag(probe: dict[str, Any]) -> None:
    assert "--log-straggler" in probe["absent"]["temperature"]
    assert "--log-straggler" in probe["absent"]["power"]
    assert "--record-memory-history" in probe["absent"]["history"]


def test_events_measure_time(probe: dict[str, Any]) -> None:
    assert 50 <= probe["milliseconds"] < 5000


def test_the_cuda_generator_is_the_one_that_models_draw_from(probe: dict[str, Any]) -> None:
    assert probe["random"] == {"state": True, "seed": True, "loaders leave it alone": True}


def test_installing_again_changes_nothing(probe: dict[str, Any]) -> None:
    assert probe["idempotent"]
    assert "already runs on cpu" in probe["other device"]


def test_gpu_packages_are_hidden_from_megatron(probe: dict[str, Any]) -> None:
    assert not probe["megatron finds transformer engine"]
    assert {"transformer_engine", "flash_attn"} <= set(probe["hidden modules"])
    assert [note for note in probe["notes"] if "transformer_engine, flash_attn" in note]


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has installed nothing and has not imported Megatron."""
    monkeypatch.setattr(installation, "_installed", None)
    for name in ("megatron.core", "megatron.training"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize("module", ["megatron.core", "megatron.training"])
@pytest.mark.usefixtures("not_installed")
def test_refuses_to_come_after_megatron(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    with pytest.raises(RuntimeError, match=rf"{module} is already imported; call .*install before"):
        cpu_runtime.install("cpu")


@pytest.mark.usefixtures("not_installed")
def test_cuda_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"--device cuda: needs a CUDA device.*--device cpu or --device auto works"):
        cpu_runtime.install("cuda")


@pytest.mark.usefixtures("not_installed")
def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--device tpu: must be one of auto, cpu, cuda"):
        cpu_runtime.install("tpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.usefixtures("not_installed")
def test_nothing_changes_where_cuda_is_used(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    spaces = (torch, torch.cuda, torch.cuda.random, torch.distributed, threading.Thread, torch.utils.data.DataLoader)
    before = [dict(vars(space)) for space in spaces]
    modules, finders = dict(sys.modules), list(sys.meta_path)
    info = cpu_runtime.install(device)
    assert info.device == "cuda"
    assert info.notes == ()
    assert ("NVIDIA H200" in info.reason) == (device == "auto")
    assert [dict(vars(space)) for space in spaces] == before
    assert (dict(sys.modules), list(sys.meta_path)) == (modules, finders)
    assert cpu_runtime.install("auto") is info
