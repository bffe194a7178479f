# SPDX-License-Identifier: Apache-2.0
"""Checks every link inside the built site: the file exists, and so does the anchor. No network.

.venv/bin/python docs/check_links.py build/docs

prints what is broken; the exit status is 1 then.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    """Collects the links and the anchors of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """See the base class."""
        for name, value in attrs:
            if value and name in ("href", "src"):
                self.links.add(value)
            elif value and name in ("id", "name"):
                self.anchors.add(value)


def read_page(path: Path) -> _Page:
    """Return the links and anchors of an HTML file."""
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def broken_links(site: Path) -> tuple[int, list[str]]:
    """Return how many links there are inside the site, and those that lead nowhere.

    Args:
        site: folder of the built site.
    """
    pages = {path.resolve(): read_page(path) for path in sorted(site.rglob("*.html"))}
    checked, broken = 0, []
    for path, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            checked += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            found = pages.get(target)
            if not target.exists() or (parts.fragment and found and unquote(parts.fragment) not in found.anchors):
                broken.append(f"{path.relative_to(site.resolve())}: {link}")
    return checked, broken


def main() -> int:
    """Print the broken links of the site that is named on the command line."""
    checked, broken = broken_links(Path(sys.argv[1]))
    print(*broken, f"{checked} links inside the site, {len(broken)} of them broken", sep="\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
