# SPDX-License-Identifier: Apache-2.0
"""Settings of the documentation site, for Sphinx: `make docs`.

The sources are the whole repository, so that pages outside docs/ belong to the site and a link between pages is the
same there and where the repository is read. What a page links to and is no page (a test, a recipe) is copied.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from megatron_csbp import __version__  # noqa: E402

project = "megatron_csbp"
author = "The megatron_csbp contributors"
project_copyright = f"{author}, Apache License 2.0"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "docs.messages"]
root_doc = "docs/index"
include_patterns = ["docs/**.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/RESULTS.md", "examples/README.md"]
# The first are not looked into; README.md has its pages (index, getting_started), and the template is a form.
exclude_patterns = [".*", "build", "demo_output", "dist", "megatron_csbp", "tests", "docs/adr/template.md"]

myst_heading_anchors = 4

# Docstrings write code in single backticks. Megatron is not imported (it takes longer than all else together).
default_role = "code"
autodoc_mock_imports = ["megatron", "transformer_engine", "triton"]
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
napoleon_use_ivar = True
# A reference has to exist, if it is one to this package: the types of others would need the network.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!megatron_csbp\.).*"),
    ("py:.*", r"megatron_csbp\..*\.(Shape|IntArray|Arguments|Config)"),
    # Named in signatures; these packages have no page.
    ("py:.*", r"megatron_csbp\.(reporting|transformer\.delta_net)\..*"),
]

html_theme = "furo"
html_title = f"megatron_csbp {version}"
html_copy_source = False
html_show_sourcelink = False
# The start page is at the root of the site too.
html_additional_pages = {"index": "start.html"}
templates_path = ["templates"]
