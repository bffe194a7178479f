# SPDX-License-Identifier: Apache-2.0
"""Just enough SVG for the figures: rectangles, triangles and text, the same bytes every time."""

from html import escape

_STYLE = "font-family:sans-serif;font-size:11px"


class Drawing:
    """A picture that grows with what is put on it; all measures are pixels.

    Attributes:
        title: what it shows, for those who do not see it.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._shapes: list[str] = []
        self._width = self._height = 0.0

    def rectangle(self, x: float, y: float, width: float, height: float, fill: str, title: str = "") -> None:
        """Draw a filled rectangle; a title is shown when the mouse is on it."""
        self._grow(x + width, y + height)
        about = f"<title>{escape(title)}</title>" if title else ""
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self._shapes.append(f'<rect {place} fill="{fill}" stroke="#ffffff" stroke-width="0.5">{about}</rect>')

    def triangle(self, corners: list[tuple[float, float]], fill: str, title: str = "") -> None:
        """Draw a filled polygon."""
        for x, y in corners:
            self._grow(x, y)
        points = " ".join(f"{x:g},{y:g}" for x, y in corners)
        about = f"<title>{escape(title)}</title>" if title else ""
        self._shapes.append(f'<polygon points="{points}" fill="{fill}">{about}</polygon>')

    def text(self, x: float, y: float, words: str, anchor: str = "start", fill: str = "#333333") -> None:
        """Write words with their base line at y; `anchor` says which end is at x."""
        end = {"start": x + 6.2 * len(words), "middle": x + 3.1 * len(words), "end": x}[anchor]
        self._grow(end, y + 4)
        self._shapes.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}">{escape(words)}</text>')

    def legend(self, x: float, y: float, entries: dict[str, str]) -> None:
        """Explain colours, one line each."""
        for number, (words, fill) in enumerate(entries.items()):
            self.rectangle(x, y + 18 * number, 12, 12, fill)
            self.text(x + 18, y + 18 * number + 10, words)

    def svg(self) -> str:
        """Return the file's text."""
        width, height = round(self._width) + 10, round(self._height) + 10
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" style="{_STYLE}" role="img">'
        )
        ground = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
        return "\n".join([head, f"<title>{escape(self.title)}</title>", ground, *self._shapes, "</svg>", ""])

    def _grow(self, x: float, y: float) -> None:
        self._width, self._height = max(self._width, x), max(self._height, y)
