# SPDX-License-Identifier: Apache-2.0
"""Mutation testing with the standard library: change one operator or number of the package, and see a test fail.

    python -m tests.support.mutate --sample 100 --seed 0 megatron_csbp/transformer megatron_csbp/loss

Each mutant is a forked process, in which one module is compiled from a changed syntax tree and the unit tests of its
folder run up to the first failure: those of the module itself first, then the rest. Tests that spawn ranks would
import the module as it is on disk, so they are left out. Nothing on disk changes.
"""

import argparse
import ast
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.And: ast.Or, ast.Or: ast.And, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
_NAMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "any": "all", "all": "any"}
_SKIPPED = ("_gloo", "streams_one_queue", "planning_cost")
"""Tests that spawn ranks, or that measure."""


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        path: of the module.
        line: of the change.
        change: what it is.
        tree: the module with it.
    """

    path: Path
    line: int
    change: str
    tree: ast.Module

    @property
    def module(self) -> str:
        return ".".join(self.path.with_suffix("").parts)


def places_of(path: Path) -> list[tuple[Path, int]]:
    """Return where a module can be changed; messages, annotations, assertions and Triton kernels stay."""
    return [(path, number) for number, _ in enumerate(_changeable(ast.parse(path.read_text())))]


def mutant_at(path: Path, number: int) -> Mutant:
    """Return the mutant of one of a module's places."""
    tree = ast.parse(path.read_text())
    node = next(itertools.islice(_changeable(tree), number, None))
    before = ast.unparse(node)
    _change(node)
    return Mutant(
        path, getattr(node, "lineno", 0), f"{before}  ->  {ast.unparse(node)}", ast.fix_missing_locations(tree)
    )


def _changeable(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that `_change` can change, in a fixed order."""
    if isinstance(node, ast.Assert | ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.TypeAlias):
        return
    if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(name) for name in node.decorator_list):
        return  # Triton reads its source from the disk
    if (
        (isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPS)
        or (isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in _SWAPS)
        or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub))
        or (isinstance(node, ast.Constant) and type(node.value) in (int, bool))
        or (isinstance(node, ast.Name) and node.id in _NAMES)
        or (isinstance(node, ast.Attribute) and node.attr in _NAMES)
    ):
        yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _changeable(child)


def _change(node: ast.AST) -> None:
    if isinstance(node, ast.Compare):
        node.ops[0] = _SWAPS[type(node.ops[0])]()  # type: ignore[call-overload]
    elif isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign):
        node.op = _SWAPS[type(node.op)]()  # type: ignore[assignment]
    elif isinstance(node, ast.UnaryOp):
        node.op = ast.UAdd() if isinstance(node.op, ast.USub) else ast.Not()
        if isinstance(node.op, ast.Not):
            node.operand = ast.UnaryOp(ast.Not(), node.operand)
    elif isinstance(node, ast.Constant):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1  # type: ignore[operator]
    elif isinstance(node, ast.Name):
        node.id = _NAMES[node.id]
    elif isinstance(node, ast.Attribute):
        node.attr = _NAMES[node.attr]


class _Loader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the mutant in place of its module."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._mutant.module:
            return None
        return importlib.util.spec_from_loader(name, self, origin=str(self._mutant.path))

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = str(self._mutant.path)
        exec(compile(self._mutant.tree, str(self._mutant.path), "exec"), module.__dict__)

    def pytest_configure(self) -> None:
        """Come before pytest's own importer, which takes any `*_test.py` for a module of tests."""
        sys.meta_path.insert(0, self)


def tests_of(path: Path) -> tuple[list[str], list[str]]:
    """Return the test files for a module: its own, and those of its folder and of the one above."""
    folder = Path("tests/unit_tests", *path.parent.parts[1:])
    near = sorted(folder.glob(f"test_{path.stem.lstrip('_')}*.py"))
    rest = [*sorted(folder.glob("test_*.py")), *sorted(folder.parent.glob("test_*.py"))]
    if folder.name in ("transformer", "loss"):
        rest = [*sorted(folder.rglob("test_*.py"))]
    own, others = (
        [str(file) for file in files if not any(part in file.name for part in _SKIPPED)] for files in (near, rest)
    )
    return own, [file for file in others if file not in own]


def survives(mutant: Mutant, seconds: int) -> bool:
    """Run the tests on a mutant in a fork; a mutant that takes too long is as good as killed."""
    child = os.fork()
    if child == 0:
        os.setsid()
        with Path(os.devnull).open("w") as silence:
            os.dup2(silence.fileno(), 1)
            os.dup2(silence.fileno(), 2)
        os._exit(_run_tests(mutant))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _run_tests(mutant: Mutant) -> int:
    """Return 0 if all tests pass; those of the module itself come first, alone, since they are soon collected."""
    import pytest

    loader = _Loader(mutant)
    sys.meta_path.insert(0, loader)
    for files in tests_of(mutant.path):
        options = ["-x", "-q", "-p", "no:cacheprovider"]
        status = int(pytest.main([*options, *files], plugins=[loader])) if files else 0
        if status not in (0, 5):  # 5: no tests
            return status
    return 0


def main() -> None:
    """Try a sample of the mutants of some folders, and print those that survive and the score."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--sample", type=int, default=100, help="mutants to try; 0 for all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=int, default=900, help="a mutant that takes longer counts as killed")
    args = parser.parse_args()
    files = [file for path in args.paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    places = [place for file in files for place in places_of(file)]
    random.Random(args.seed).shuffle(places)
    chosen = [mutant_at(*place) for place in places[: args.sample or None]]
    # What is slow to import and not under test is there before the forks.
    for name in (
        "torch",
        "hypothesis",
        "megatron.core.transformer.transformer_config",
        "megatron.core.packed_seq_params",
    ):
        importlib.import_module(name)
    survivors = 0
    for number, mutant in enumerate(chosen, 1):
        alive = survives(mutant, args.seconds)
        survivors += alive
        print(f"{number} {'SURVIVES' if alive else 'killed'} {mutant.path}:{mutant.line}: {mutant.change}", flush=True)
    score = 100 * (len(chosen) - survivors) / len(chosen)
    print(f"{len(chosen) - survivors} of {len(chosen)} killed ({score:.0f} %), of {len(places)} mutants in all")


if __name__ == "__main__":
    main()
