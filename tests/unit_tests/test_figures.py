# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from docs import draw_figures, draw_pictures


@pytest.mark.parametrize("page", draw_figures.PAGES, ids=lambda page: page.name)
def test_figures_are_those_of_the_plan(page: Path) -> None:
    text = page.read_text()
    assert "<!-- figure: " in text
    assert draw_figures.with_figures(text) == text, "run docs/draw_figures.py --write"


@pytest.mark.parametrize("name", draw_pictures.PICTURES)
def test_pictures_are_those_of_the_plan_and_of_the_code(name: str) -> None:
    drawn = draw_pictures.PICTURES[name]().svg()
    assert (draw_pictures.FOLDER / f"{name}.svg").read_text() == drawn, "run docs/draw_pictures.py"
