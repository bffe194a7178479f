# SPDX-License-Identifier: Apache-2.0
"""Small pieces of Markdown and plain words for numbers."""

from collections.abc import Sequence
from itertools import pairwise


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table; the first column is text, the others are figures."""
    align = ["---", *("---:" for _ in header[1:])]
    return ["| " + " | ".join(cells) + " |" for cells in (header, align, *rows)]


def span(values: Sequence[float], form: str = ".2f", unit: str = "") -> str:
    """Return one figure, or the smallest and the largest."""
    low, high = f"{min(values):{form}}{unit}", f"{max(values):{form}}{unit}"
    return low if low == high else f"{low} to {high}"


def trend(values: Sequence[float], tolerance: float = 0.02) -> str:
    """Return whether a series grows, falls, stays, or does neither steadily.

    Args:
        values: the series.
        tolerance: relative steps below this count as none.
    """
    steps = [after / before - 1 for before, after in pairwise(values)]
    grows, falls = any(step > tolerance for step in steps), any(step < -tolerance for step in steps)
    if grows and falls:
        return "neither grows nor falls steadily"
    if grows:
        return "grows"
    return "falls" if falls else "stays"


def mebibytes(count: float) -> str:
    """Return a byte count in MiB."""
    return f"{count / 2**20:.3f}"


def gibibytes(count: float) -> str:
    """Return a byte count in GiB."""
    return f"{count / 2**30:.2f}"


def percent(share: float, digits: int = 1) -> str:
    """Return a share in percent."""
    return f"{100 * share:.{digits}f} %"


def thousands(length: int) -> str:
    """Return a length in tokens the way people write it."""
    if length % 2**20 == 0:
        return f"{length // 2**20}M"
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)
