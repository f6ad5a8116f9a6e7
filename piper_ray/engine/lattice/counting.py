"""Counts the downsets and nested pairs of a graph without listing them."""

from __future__ import annotations

from collections.abc import Sequence

from piper_ray.engine.lattice.layer_graph import LayerGraph, ancestors, descendants

_MOST_VISITS = 1_000_000
"""Vertices visited, over all sub-posets, before giving up: about a second."""

_MOST_VERTICES = 2_500


class _TooMuchWork(Exception):
    pass


def count_downsets(graph: LayerGraph, most_visits: int = _MOST_VISITS) -> int | None:
    """Returns the number of downsets; None if the graph is too entangled to count them within ``most_visits``."""
    is_chain = _is_chain(descendants(graph.successors))
    return graph.size + 1 if is_chain else _count_all(graph.successors, most_visits)


def count_pairs(graph: LayerGraph) -> int | None:
    """Returns the number of pairs of downsets J < I; None as in ``count_downsets``.

    A pair J <= I is a downset of two copies of the graph, in which each vertex of the copy for J requires that vertex
    in the copy for I.
    """
    n = graph.size
    if _is_chain(descendants(graph.successors)):
        return n * (n + 1) // 2
    twice = [tuple(heads) for heads in graph.successors]
    twice += [(*(head + n for head in heads), v) for v, heads in enumerate(graph.successors)]
    nested, downsets = _count_all(twice, _MOST_VISITS), count_downsets(graph)
    return nested - downsets if nested is not None and downsets is not None else None


def count_cuts(graph: LayerGraph) -> list[int] | None:
    """Returns for each edge of ``graph.edges`` the number of downsets with its head and without its tail; None as
    above."""
    if graph.size > _MOST_VERTICES:
        return None
    counter = _Counter(graph.successors, _MOST_VISITS)
    everything = (1 << graph.size) - 1
    try:
        return [
            counter.count(everything & ~(counter.above(tail) | counter.below(head))) for tail, head, _ in graph.edges
        ]
    except (_TooMuchWork, RecursionError):
        return None


def _is_chain(descendants: list[int]) -> bool:
    """Whether the graph is a chain. Vertices are numbered successors first."""
    return all(below.bit_count() == v for v, below in enumerate(descendants))


def _count_all(successors: Sequence[Sequence[int]], most_visits: int) -> int | None:
    if len(successors) > _MOST_VERTICES:
        return None
    try:
        return _Counter(successors, most_visits).count((1 << len(successors)) - 1)
    except (_TooMuchWork, RecursionError):
        return None


class _Counter:
    """Counts downsets of sub-posets, given as bit masks of vertices, and remembers the counts. Raises _TooMuchWork.

    Vertices are numbered successors first.
    """

    def __init__(self, successors: Sequence[Sequence[int]], most_visits: int) -> None:
        n = len(successors)
        self._descendants = descendants(successors)
        self._ancestors = ancestors(successors)
        self._related = [self._descendants[v] | self._ancestors[v] | 1 << v for v in range(n)]
        self._known: dict[int, int] = {}
        self._visits_left = most_visits

    def above(self, v: int) -> int:
        """Returns ``v`` and its ancestors."""
        return self._ancestors[v] | 1 << v

    def below(self, v: int) -> int:
        """Returns ``v`` and its descendants."""
        return self._descendants[v] | 1 << v

    def count(self, poset: int) -> int:
        """Returns the number of downsets of a convex ``poset``."""
        if poset & (poset - 1) == 0:
            return 2 if poset else 1
        if poset in self._known:
            return self._known[poset]
        self._visits_left -= poset.bit_count()
        if self._visits_left < 0:
            raise _TooMuchWork
        total = 1
        for part in self._components(poset):
            if part != poset:
                total *= self.count(part)
                continue
            # Either v is outside, with its ancestors, or it is inside, with its descendants.
            v = self._pivot(part)
            total *= self.count(part & ~self.above(v)) + self.count(part & ~self.below(v))
        self._known[poset] = total
        return total

    def _pivot(self, part: int) -> int:
        """Returns the vertex related to most others and, among those, the most central one: it leaves the smallest
        parts."""
        most, least_apart, pivot = -1, 0, -1
        for v in _bits(part):
            related = (self._related[v] & part).bit_count()
            if related < most:
                continue
            apart = abs((self._descendants[v] & part).bit_count() - (self._ancestors[v] & part).bit_count())
            if related > most or apart < least_apart:
                most, least_apart, pivot = related, apart, v
        return pivot

    def _components(self, poset: int) -> list[int]:
        parts = []
        while poset:
            part, frontier = 0, poset & -poset
            while frontier:
                part |= frontier
                reached = part
                for v in _bits(frontier):
                    reached |= self._related[v]
                    if poset & ~reached == 0:  # as in most cases, after a few vertices
                        part = poset
                        break
                frontier = reached & poset & ~part
            parts.append(part)
            poset &= ~part
        return parts


def _bits(mask: int) -> list[int]:
    """Returns the vertices of a mask, ascending."""
    written = bin(mask)[:1:-1]
    found, at = [], written.find("1")
    while at >= 0:
        found.append(at)
        at = written.find("1", at + 1)
    return found
