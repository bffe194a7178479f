# SPDX-License-Identifier: Apache-2.0
"""A Sphinx extension: `{messages} FOLDER ...` lists every error that those parts of the package raise for a user.

The texts are read from the code when the site is built, so nothing has to be kept up. A value stands as three dots.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

PACKAGE = Path(__file__).parents[1] / "megatron_csbp"
_SHORTEST = 25


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return "..."


def _raised(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Raise(exc=ast.Call(func=ast.Name(id="ValueError"), args=[text, *_])):
                yield _text(text)


def messages(paths: list[str]) -> list[str]:
    """Return the texts of the ValueErrors in files and folders of the package, in alphabetical order.

    Args:
        paths: relative to the package; a folder stands for all in it.
    """
    files: list[Path] = []
    for path in paths:
        files += [PACKAGE / path] if path.endswith(".py") else (PACKAGE / path).rglob("*.py")
    found = {text.strip() for file in files for text in _raised(ast.parse(file.read_text(encoding="utf-8")))}
    # What is nearly all values says nothing here.
    return sorted((text for text in found if len(text.replace("...", "").strip()) >= _SHORTEST), key=str.lower)


class MessagesDirective(SphinxDirective):
    """A list of messages, each as code."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Return the list."""
        paths = self.arguments[0].split()
        for path in paths:
            self.env.note_dependency(str(PACKAGE / path))
        items = [nodes.list_item("", nodes.paragraph("", "", nodes.literal(text, text))) for text in messages(paths)]
        return [nodes.bullet_list("", *items)]


def setup(app: Sphinx) -> dict[str, bool]:
    """Make the directive known."""
    app.add_directive("messages", MessagesDirective)
    return {"parallel_read_safe": True}
