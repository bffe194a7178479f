# SPDX-License-Identifier: Apache-2.0
"""Broken packages, made for real in a folder of their own: each is named with its remedy."""

from pathlib import Path

import pytest

from megatron_csbp.doctor import software
from megatron_csbp.doctor.findings import Finding, State


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages before all others, in this process and its children."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return tmp_path


def install(site: Path, package: str, version: str, **files: str) -> None:
    """Make a distribution with a module of the same name, and further files in it."""
    folder = site / package.replace("-", "_")
    folder.mkdir()
    for name, text in {"__init__": "", **files}.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    info = site / f"{folder.name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


def check(finding: Finding, state: State, detail: str, fix: str) -> None:
    assert (finding.state, detail in finding.detail, fix in finding.fix) == (state, True, True), finding.lines


def test_another_transformer_engine_is_named_with_the_versions_that_work(site: Path) -> None:
    install(site, "transformer-engine", "2.7.1")
    (finding,) = software._transformer_engine(has_gpu=True)
    check(finding, State.FAIL, "2.7.1; from 2.9 to 2.20 are supported", "transformer-engine[core-cu13,pytorch]>=2.9")


@pytest.mark.parametrize("has_gpu, state", [(True, State.FAIL), (False, State.WARN)])
def test_a_transformer_engine_that_does_not_import_says_why(has_gpu: bool, state: State, site: Path) -> None:
    install(site, "transformer-engine", "2.20.2", pytorch="raise ImportError('undefined symbol: _ZN3c10')")
    (finding,) = software._transformer_engine(has_gpu)
    check(finding, state, "does not import: ImportError: undefined symbol: _ZN3c10", "build its PyTorch part")


def test_a_transformer_engine_that_ends_the_process_does_not_end_the_doctor(site: Path) -> None:
    install(site, "transformer-engine", "2.20.2", pytorch="import os; os.abort()")
    (finding,) = software._transformer_engine(has_gpu=True)
    check(finding, State.FAIL, "does not import: ended by signal 6", "build its PyTorch part")


def test_fused_attention_that_is_turned_off_is_told(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "transformer-engine", "2.20.2", pytorch="")
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    imports, fused = software._transformer_engine(has_gpu=True)
    assert imports.state is State.OK
    check(fused, State.WARN, "NVTE_FUSED_ATTN=0", "unset NVTE_FUSED_ATTN")


def test_the_unrelated_apex_is_told_from_nvidias(site: Path) -> None:
    install(site, "apex", "0.9.10.dev0", registration="")
    check(
        software._apex(has_gpu=False), State.FAIL, "is not NVIDIA's: it has no apex.optimizers", "pip uninstall apex"
    )


def test_nvidias_apex_is_accepted_if_it_imports(site: Path) -> None:
    install(site, "apex", "0.1", **{"optimizers/__init__": ""})
    assert software._apex(has_gpu=True).state is State.OK
    (site / "apex/optimizers/__init__.py").write_text("raise ImportError('no amp_C')")
    check(software._apex(has_gpu=True), State.FAIL, "does not import: ImportError: no amp_C", "build NVIDIA's")


def test_a_broken_torch_is_found_before_anything_needs_it(site: Path) -> None:
    install(site, "torch", "2.9.0", __init__="raise OSError('libcudart.so.13: cannot open')")
    python, torch = software.check_software()
    assert python.state is State.OK
    check(torch, State.FAIL, "does not import: OSError: libcudart.so.13", "pip install 'torch>=2.9'")


def test_another_megatron_is_named_with_the_versions_that_work(site: Path) -> None:
    """What it says of itself counts, as in a checkout that stands before the installed one."""
    code = "from megatron_csbp import required_symbols\nrequired_symbols.megatron_version = lambda: '0.17.1'\n"
    (site / "sitecustomize.py").write_text(code)
    check(software._megatron(), State.FAIL, "megatron-core 0.17.1 is not supported", "megatron-core>=0.19,<0.20")
