# SPDX-License-Identifier: Apache-2.0
"""Rules of CONTRIBUTING.md that ruff and mypy cannot check."""

import ast
import importlib
import tokenize
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
LONGEST_FILE = 300
LONGEST_FUNCTION = 60


def sources(*folders: str) -> dict[str, Path]:
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert paths
    return {str(path.relative_to(ROOT)): path for path in paths}


SHIPPED = sources("megatron_csbp", "examples", "benchmarks")
ALL = SHIPPED | sources("tests")


def test_every_file_starts_with_its_licence() -> None:
    first_lines = {name: path.read_text().split("\n", 1)[0] for name, path in ALL.items()}
    assert {name: line for name, line in first_lines.items() if line != "# SPDX-License-Identifier: Apache-2.0"} == {}


def test_shipped_files_are_short() -> None:
    lengths = {name: len(path.read_text().splitlines()) for name, path in SHIPPED.items()}
    assert {name: n for name, n in lengths.items() if n > LONGEST_FILE} == {}


def test_shipped_functions_are_short() -> None:
    lengths = {
        f"{name}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for name, path in SHIPPED.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: n for name, n in lengths.items() if n > LONGEST_FUNCTION} == {}


def test_commands_print_results_in_one_way_which_lets_their_reader_leave() -> None:
    """As `python -m megatron_csbp.generate ... --show-steps | head` does. What else prints is the log of training."""
    log = {"check_mode.py", "reporting/start_summary.py", "reporting/traffic_report.py"}
    package = {path.relative_to(ROOT / "megatron_csbp"): path for path in sources("megatron_csbp").values()}
    assert {str(name) for name, path in package.items() if prints(path.read_text())} == log | {"results.py"}


def prints(text: str) -> bool:
    calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    printing = (call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print")
    return any(all(keyword.arg != "file" for keyword in call.keywords) for call in printing)


def comments_of(path: Path) -> list[tokenize.TokenInfo]:
    with path.open("rb") as file:
        return [token for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT]


def test_comments_are_ascii() -> None:
    comments = {f"{name}:{token.start[0]}": token.string for name, path in ALL.items() for token in comments_of(path)}
    assert {place: text for place, text in comments.items() if not text.isascii()} == {}


def test_what_tests_reach_for_in_modules_of_the_package_exists() -> None:
    """Also in tests that `make test` leaves out, where a name that has moved would stay unnoticed."""
    missing = []
    for name, path in ALL.items():
        tree = ast.parse(path.read_text())
        modules = _modules_of_the_package(tree)
        reached = [
            (node.lineno, node.value.id, node.attr)
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules
        ]
        missing += [f"{name}:{line}: {of}.{what}" for line, of, what in reached if not hasattr(modules[of], what)]
    assert missing == []


def _modules_of_the_package(tree: ast.Module) -> dict[str, ModuleType]:
    """Return the modules that a file imports from the package at its top, by the names that it gives them."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "megatron_csbp":
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                if _is_module(module):
                    found[alias.asname or alias.name] = importlib.import_module(module)
    return found


def _is_module(name: str) -> bool:
    path = ROOT / Path(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()
