"""Pieces of SVG: escaped where they are made, coordinates to a tenth of a unit."""

from __future__ import annotations

import math
from collections.abc import Iterable

from markupsafe import Markup


def number(value: float) -> str:
    """``12``, ``12.3``: to a tenth."""
    return f"{value:.1f}".removesuffix(".0")


def rect(x: float, y: float, width: float, height: float, style: str) -> Markup:
    """style: its class."""
    return Markup('<rect x="{}" y="{}" width="{}" height="{}" class="{}"/>').format(
        number(x), number(y), number(width), number(height), style
    )


def label(x: float, y: float, text: str, style: str) -> Markup:
    """x, y: where the text begins, or its middle or end, as its class says; y of its base line."""
    return Markup('<text x="{}" y="{}" class="{}">{}</text>').format(number(x), number(y), style, text)


def titled(pieces: Iterable[Markup], title: str) -> Markup:
    """A group with what a pointer on it shows."""
    return Markup("<g><title>{}</title>{}</g>").format(title, Markup().join(pieces))


def picture(width: float, height: float, pieces: Iterable[Markup], text: str, style: str) -> Markup:
    """text: what it says to those who cannot see it."""
    return Markup('<svg class="{}" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        style, number(width), number(height), text, Markup().join(pieces)
    )


def ticks(until: float, most: int = 8) -> list[float]:
    """Round figures from 0 to ``until``, at most ``most`` apart from 0."""
    if not (until > 0 and math.isfinite(until)):
        return [0.0]
    size = 10.0 ** math.floor(math.log10(until / most))
    step = next(step for step in (size, 2 * size, 5 * size, 10 * size, 20 * size) if until / step <= most)
    return [step * number for number in range(int(until / step + 1e-9) + 1)]
