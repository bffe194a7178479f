# SPDX-License-Identifier: Apache-2.0
"""Rules of CONTRIBUTING.md that ruff and mypy cannot check."""

import ast
import tokenize
from pathlib import Path

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


def comments_of(path: Path) -> list[tokenize.TokenInfo]:
    with path.open("rb") as file:
        return [token for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT]


def test_comments_are_ascii() -> None:
    comments = {f"{name}:{token.start[0]}": token.string for name, path in ALL.items() for token in comments_of(path)}
    assert {place: text for place, text in comments.items() if not text.isascii()} == {}
