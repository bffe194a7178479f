# SPDX-License-Identifier: Apache-2.0
"""The documentation site builds without a warning, and no link inside it leads nowhere. No network."""

import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

from docs.check_links import broken_links
from tests.support.megatron_run import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build as `make docs` does: any warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-n", "-W", "--keep-going", "-q"]
    command += ["-d", str(folder / "doctrees"), "-c", "docs", ".", str(folder / "html")]
    run = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return folder / "html"


def test_make_docs_runs_the_same_commands() -> None:
    recipe = (ROOT / "Makefile").read_text().partition("\ndocs:")[2].partition("\n\n")[0]
    assert "-m sphinx -b html -n -W --keep-going -q" in recipe
    assert "docs/check_links.py build/docs" in recipe


def test_every_link_inside_the_site_leads_somewhere(site: Path) -> None:
    checked, broken = broken_links(site)
    assert checked > 1000
    assert broken == []


def test_every_page_is_in_the_site(site: Path) -> None:
    pages = {path.relative_to(ROOT).with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    missing = {str(page) for page in pages if not (site / page).exists()}
    assert missing == {"docs/adr/template.html"}
    assert (site / "index.html").exists()


def test_the_reference_has_the_docstrings(site: Path) -> None:
    page = (site / "docs" / "api" / "geometry.html").read_text()
    assert 'id="megatron_csbp.transformer.geometry.plan.plan_attention"' in page
    # An argument of its docstring.
    assert "<strong>clean_queries</strong>" in page


def test_the_messages_are_those_of_the_code(site: Path) -> None:
    page = (site / "docs" / "messages.html").read_text()
    assert "--diffusion-block-size ... must be at least 1 token; 32 is a usual value." in unescape(
        re.sub("<[^>]+>", "", page)
    )


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<p id="here"><a href="b.html#there">b</a> <a href="#here">a</a></p>')
    (tmp_path / "b.html").write_text('<a href="c.html">c</a> <a href="https://example.org/x">x</a>')
    assert broken_links(tmp_path) == (3, ["a.html: b.html#there", "b.html: c.html"])
