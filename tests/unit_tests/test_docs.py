# SPDX-License-Identifier: Apache-2.0
"""The pages say what the code says: links, flags, messages and computed figures."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs import write_models
from megatron_csbp.transformer.geometry.layer_plans import layer_plans
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import Scheme, Sharding
from megatron_csbp.transformer.geometry.transfers import row_bytes
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "examples/README.md"]
PAGES += [ROOT / "benchmarks/RESULTS.md"]
PAGES += sorted(set((ROOT / "docs").rglob("*.md")) - {ROOT / "docs/adr/template.md"})
README, TROUBLESHOOTING = ROOT / "README.md", ROOT / "docs" / "troubleshooting.md"


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        path, _, anchor = link.partition("#")
        if link.startswith("http"):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 150


def test_the_flags_page_is_the_parsers() -> None:
    script = [sys.executable, str(ROOT / "docs" / "write_flags.py")]
    written = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    assert (ROOT / "docs" / "flags.md").read_text() == written, "run docs/write_flags.py > docs/flags.md"


def test_the_flags_in_short_are_flags() -> None:
    short, _, every = (ROOT / "docs" / "flags.md").read_text().partition("## All")
    first_column = [line.split("|")[1] for line in short.splitlines() if line.startswith("| `--")]
    flags = [flag for cell in first_column for flag in re.findall(r"--[a-z-]+", cell)]
    assert len(flags) >= 9
    assert [flag for flag in flags if f"`{flag}`" not in every] == []


def test_the_page_of_faults_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "faults.md").read_text()
    named = re.findall(r"\[([^\]]+)\]\(\.\./(tests/[\w/]+/test_\w+\.py)\)", text)
    assert len(named) >= 80
    defined = {file: (ROOT / file).read_text() for _, file in named}
    missing = [f"{file}: {name}" for name, file in named if f"def test_{name.replace(' ', '_')}(" not in defined[file]]
    assert missing == []


def messages() -> str:
    """Return every string of the package, values of f-strings left out."""
    found = []
    for path in (ROOT / "megatron_csbp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(p.value if isinstance(p, ast.Constant) else "\0" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_quoted_messages_are_in_the_code() -> None:
    table = TROUBLESHOOTING.read_text().partition("## At start")[2].partition("\n## While it runs")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    quoted = [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    assert len(quoted) >= 50
    said = messages()
    assert [message for message in quoted if message not in said] == []


def test_figures_of_the_14b_model_are_the_plans() -> None:
    gibibytes = {}
    for scheme in (Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL, Scheme.CONTEXT_PARALLEL):
        plan = layer_plans(Sample(262_144, 32), Sharding(8, scheme), 0).plan(Mask(CleanAttention.TOKEN_CAUSAL))
        moved = sum(transfer.gather_bytes(row_bytes(8, 128, 2)) for _, transfer in plan.transfers)
        gibibytes[scheme] = 40 * 3 * moved / 2**30
    csbp, cp = (f"{number:.2f} GiB" for number in gibibytes.values())
    assert (csbp, cp) == ("105.00 GiB", "210.00 GiB")
    text = " ".join((ROOT / "docs" / "parallelism.md").read_text().split())
    assert f"receives {csbp} for each sequence and rank under CSBP, and {cp.removesuffix(' GiB')}" in text


def test_the_page_of_models_is_the_tables() -> None:
    assert (ROOT / "docs" / "models.md").read_text() == write_models.page(), (
        "run docs/write_models.py > docs/models.md"
    )
