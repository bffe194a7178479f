# SPDX-License-Identifier: Apache-2.0
"""The contract with Megatron-Core: its version, and every symbol that is not public API, one by one."""

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_csbp import megatron_compat
from megatron_csbp.megatron_compat import REQUIRED_SYMBOLS, RequiredSymbol

PACKAGE = Path(megatron_compat.__file__).parent
COMPATIBILITY_MODULES = (
    "megatron_compat.py",
    "megatron_arguments.py",
    "megatron_checkpoints.py",
    "megatron_delta_net.py",
    "megatron_planning.py",
    "megatron_reporting.py",
    "megatron_start.py",
)


@pytest.mark.parametrize("symbol", REQUIRED_SYMBOLS, ids=lambda symbol: symbol.name)
def test_megatron_has(symbol: RequiredSymbol) -> None:
    symbol.check()


def test_no_symbol_is_named_twice() -> None:
    assert len({symbol.name for symbol in REQUIRED_SYMBOLS}) == len(REQUIRED_SYMBOLS)


@pytest.mark.parametrize("file", COMPATIBILITY_MODULES)
def test_every_symbol_that_is_touched_is_in_the_table(file: str) -> None:
    known = {symbol.name for symbol in REQUIRED_SYMBOLS}
    touched = set(touched_symbols(PACKAGE / file))
    assert len(touched) > 3, "the search found nothing to check"
    assert {name for name in touched if name not in known} == set()


def touched_symbols(path: Path) -> Iterator[str]:
    """Yield what a file takes from Megatron: names that it imports, and attributes of modules that it imports."""
    tree = ast.parse(path.read_text())
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        imported = {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in ast.walk(function)
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "megatron"
            for alias in node.names
        }
        modules = {name: full for name, full in imported.items() if is_module(full)}
        yield from (full for name, full in imported.items() if name not in modules)
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                yield f"{modules[node.value.id]}.{node.attr}"


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is no package
        return False


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "megatron.core.utils.no_such_function",
            r"megatron\.core\.utils\.no_such_function \(a test\): 'no_such_function'",
        ),
        (
            "megatron.core.no_such_module.function",
            r"megatron\.core\.no_such_module\.function \(a test\): 'no_such_module'",
        ),
        ("no_such_package.function", r"no_such_package\.function \(a test\): 'no_such_package' cannot be imported"),
    ],
)
def test_a_missing_symbol_is_named(name: str, message: str) -> None:
    with pytest.raises(ImportError, match=message):
        RequiredSymbol(name, "a test").check()


def test_a_missing_parameter_is_named() -> None:
    symbol = RequiredSymbol("megatron.core.utils.get_attr_wrapped_model", "a test", ("model", "no_such_parameter"))
    with pytest.raises(ImportError, match=r"get_attr_wrapped_model \(a test\): no parameter no_such_parameter"):
        symbol.check()


def test_a_dependency_that_is_missing_is_not_taken_for_the_symbol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_more.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        RequiredSymbol("needs_more.function", "a test").check()


@pytest.mark.parametrize("version", ["0.19.0", "0.19.2", "0.19.2+193413e", "0.19.0rc1"])
def test_supported_versions(version: str) -> None:
    megatron_compat.check_megatron_version(version)


@pytest.mark.parametrize("version", ["0.18.2", "0.20.0", "0.20.0.dev0", "1.19.0"])
def test_other_versions_are_refused_with_what_to_install(version: str) -> None:
    with pytest.raises(
        ImportError, match=rf"megatron-core {version} is not supported: .* >=0\.19,<0\.20; pip install"
    ):
        megatron_compat.check_megatron_version(version)


def test_the_installed_version_is_supported() -> None:
    megatron_compat.check_megatron_version()


@pytest.fixture
def dataset_utils(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Megatron's module, with its own `compile_helpers` again afterwards."""
    utils = importlib.import_module("megatron.core.datasets.utils")
    monkeypatch.setattr(utils, "compile_helpers", utils.compile_helpers)
    return utils


def test_a_wheel_does_not_compile_its_dataset_helpers(dataset_utils: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.run", lambda *_: pytest.fail("ran make"))
    megatron_compat.ensure_dataset_helpers()
    dataset_utils.compile_helpers()


def test_a_source_checkout_compiles_as_usual(
    dataset_utils: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = dataset_utils.compile_helpers
    (tmp_path / "Makefile").touch()
    monkeypatch.setattr("inspect.getfile", lambda _: str(tmp_path / "utils.py"))
    megatron_compat.ensure_dataset_helpers()
    assert dataset_utils.compile_helpers is stock


def test_missing_dataset_helpers_are_named(
    dataset_utils: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inspect.getfile", lambda _: str(tmp_path / "utils.py"))
    monkeypatch.setitem(importlib.import_module("sys").modules, "megatron.core.datasets.helpers_cpp", None)
    with pytest.raises(
        ImportError, match=r"helpers_cpp is not compiled and .* has no Makefile.*reinstall megatron-core"
    ):
        megatron_compat.ensure_dataset_helpers()
