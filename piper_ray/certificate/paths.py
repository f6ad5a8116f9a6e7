"""Paths through a graph, found by the certificate itself: a search that finds them otherwise may be wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def reached(start: int, ahead: Mapping[int, Iterable[int]] | Sequence[Iterable[int]]) -> set[int]:
    """Returns ``start`` and all that paths from it lead to. ahead: what each layer leads to."""
    found, left = {start}, [start]
    while left:
        new = set(ahead[left.pop()]) - found
        found |= new
        left += new
    return found
