# SPDX-License-Identifier: Apache-2.0
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("draw_figures", ROOT / "docs" / "draw_figures.py")
assert SPEC is not None
assert SPEC.loader is not None
draw_figures = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(draw_figures)


@pytest.mark.parametrize("page", draw_figures.PAGES, ids=lambda page: page.name)
def test_figures_are_those_of_the_plan(page: Path) -> None:
    text = page.read_text()
    assert "<!-- figure: " in text
    assert draw_figures.with_figures(text) == text, "run docs/draw_figures.py --write"
