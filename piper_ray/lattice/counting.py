"""How many downsets and nested pairs a graph has, without listing them."""

from __future__ import annotations

from piper_ray.lattice.graph import LayerGraph, descendants

_MOST_VISITS = 1_000_000
"""Vertices looked at, over all sub-posets, before giving up: about a second."""

_MOST_VERTICES = 2_500


class _TooMuchWork(Exception):
    pass


def count_downsets(graph: LayerGraph, most_visits: int = _MOST_VISITS) -> int | None:
    """The number of downsets, or None if the graph is too entangled to count within ``most_visits``."""
    return _count(descendants(graph.successors), most_visits)


def count_pairs(graph: LayerGraph) -> int | None:
    """The number of pairs of downsets J < I, or None as above.

    A pair J <= I is a downset of the graph taken twice, where the copy of v that stands for J needs the one for I.
    """
    n = graph.size
    twice = [tuple(heads) for heads in graph.successors]
    twice += [(*(head + n for head in heads), v) for v, heads in enumerate(graph.successors)]
    nested, downsets = _count(descendants(twice), _MOST_VISITS), count_downsets(graph)
    return nested - downsets if nested is not None and downsets is not None else None


def _count(descendants: list[int], most_visits: int) -> int | None:
    n = len(descendants)
    if n > _MOST_VERTICES:
        return None
    ancestors = [0] * n
    for v, mask in enumerate(descendants):
        for w in _bits(mask):
            ancestors[w] |= 1 << v
    related = [descendants[v] | ancestors[v] | 1 << v for v in range(n)]
    known: dict[int, int] = {}
    visits = [0]

    def components(poset: int) -> list[int]:
        parts = []
        while poset:
            part, frontier = 0, poset & -poset
            while frontier:
                part |= frontier
                grown = 0
                for v in _bits(frontier):
                    grown |= related[v]
                frontier = grown & poset & ~part
            parts.append(part)
            poset &= ~part
        return parts

    def count(poset: int) -> int:
        if poset & (poset - 1) == 0:
            return 2 if poset else 1
        if poset in known:
            return known[poset]
        visits[0] += poset.bit_count()
        if visits[0] > most_visits:
            raise _TooMuchWork
        total = 1
        for part in components(poset):
            if part != poset:
                total *= count(part)
                continue
            # Either v is outside, and so are its ancestors, or it is inside with its descendants. The most related v,
            # and of those the most central one, leaves the smallest two parts.
            v = max(
                _bits(part),
                key=lambda v: (
                    (related[v] & part).bit_count(),
                    -abs((descendants[v] & part).bit_count() - (ancestors[v] & part).bit_count()),
                ),
            )
            outside = part & ~(ancestors[v] | 1 << v)
            inside = part & ~(descendants[v] | 1 << v)
            total *= count(outside) + count(inside)
        known[poset] = total
        return total

    try:
        return count((1 << n) - 1)
    except (_TooMuchWork, RecursionError):
        return None


def _bits(mask: int) -> list[int]:
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found
