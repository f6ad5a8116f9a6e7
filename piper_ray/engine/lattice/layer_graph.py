"""The contracted layer graph, with layers numbered for the lattice.

Also vertex sets as rows of uint64 words: vertex v is bit v % 64 of word v // 64.

Also counts the downsets and nested pairs of a graph without listing them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from piper_ray.engine.lattice.contraction import Contraction
from piper_ray.model.instance import Instance


def bit_rows(sets: Sequence[Iterable[int]], size: int) -> npt.NDArray[np.uint64]:
    """Returns uint64[len(sets), ceil(size / 64)], at least one word wide."""
    words = max(1, (size + 63) // 64)
    rows = [[0] * words for _ in sets]
    for row, members in zip(rows, sets, strict=True):
        for v in members:
            row[v >> 6] |= 1 << (v & 63)
    return np.array(rows, np.uint64).reshape(len(sets), words)


def members(row: npt.NDArray[np.uint64]) -> list[int]:
    """Returns the vertices of one row, ascending."""
    return [64 * word + bit for word, value in enumerate(row.tolist()) for bit in range(64) if value >> bit & 1]


def members_of(mask: int) -> npt.NDArray[np.int64]:
    """Returns the vertices of a bit mask, ascending."""
    data = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), np.uint8)
    return np.flatnonzero(np.unpackbits(data, bitorder="little"))


def runs(rows: Sequence[Sequence[int]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Concatenates rows. Returns their ``offsets`` and their values."""
    return offsets(len(row) for row in rows), np.array([value for row in rows for value in row], np.int64)


def offsets(lengths: Iterable[int]) -> npt.NDArray[np.int64]:
    """Returns int64[len + 1]: the start of each run, and the end of the last."""
    return np.concatenate(([0], np.cumsum(np.fromiter(lengths, np.int64)))).astype(np.int64)


@dataclass(frozen=True)
class LayerGraph:
    """Vertices 0..n-1, numbered so that every successor of a vertex has a smaller number than the vertex itself.

    layer_ids: the (kept) layer of each vertex. successors, predecessors: vertex numbers, ascending.
    edges: (tail, head, index into instance.edges), ordered by (head, tail).
    tensors: (at least two vertices, ascending; index into instance.tensors).
    """

    layer_ids: tuple[int, ...]
    successors: tuple[tuple[int, ...], ...]
    predecessors: tuple[tuple[int, ...], ...]
    edges: tuple[tuple[int, int, int], ...]
    tensors: tuple[tuple[tuple[int, ...], int], ...] = ()

    @property
    def size(self) -> int:
        return len(self.layer_ids)


def build_graph(instance: Instance, contraction: Contraction) -> LayerGraph:
    """Numbers the kept layers from the back: smallest file position first among those whose successors are numbered.

    Edges inside a merged group vanish. Of several edges between the same two groups, at most one costs anything; that
    one is kept, or else the first.
    """
    kept = [layer.id for layer in instance.layers if layer.id not in contraction.keeper]
    position = {layer_id: index for index, layer_id in enumerate(kept)}
    merged = contraction.keeper
    edge_of: dict[tuple[int, int], int] = {}
    for index, edge in enumerate(instance.edges):
        ends = position[merged.get(edge.source, edge.source)], position[merged.get(edge.target, edge.target)]
        # An edge that costs anything joins two kept layers.
        if ends[0] != ends[1] and (ends not in edge_of or not (edge.source in merged or edge.target in merged)):
            edge_of[ends] = index
    graph = number_graph(kept, ((tail, head, index) for (tail, head), index in edge_of.items()))
    vertex = {layer_id: v for v, layer_id in enumerate(graph.layer_ids)}
    tensors = []
    for index, tensor in enumerate(instance.tensors):
        held = {vertex[merged.get(layer, layer)] for layer in tensor.layers}
        if len(held) > 1 and tensor.forward_bytes + tensor.backward_bytes > 0.0:
            tensors.append((tuple(sorted(held)), index))
    return replace(graph, tensors=tuple(tensors))


def number_graph(ids: Sequence[int], edges: Iterable[tuple[int, int, int]]) -> LayerGraph:
    """Returns the graph of ``ids``, numbered as in ``build_graph``. edges: (position of the tail, of the head,
    index)."""
    edges = list(edges)
    successors: list[list[int]] = [[] for _ in ids]
    predecessors: list[list[int]] = [[] for _ in ids]
    for tail, head, _ in edges:
        successors[tail].append(head)
        predecessors[head].append(tail)

    missing = [len(heads) for heads in successors]
    ready = [vertex for vertex, count in enumerate(missing) if count == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        vertex = heapq.heappop(ready)
        order.append(vertex)
        for tail in predecessors[vertex]:
            missing[tail] -= 1
            if missing[tail] == 0:
                heapq.heappush(ready, tail)

    number = {vertex: new for new, vertex in enumerate(order)}
    return LayerGraph(
        layer_ids=tuple(ids[vertex] for vertex in order),
        successors=tuple(tuple(sorted(number[head] for head in successors[vertex])) for vertex in order),
        predecessors=tuple(tuple(sorted(number[tail] for tail in predecessors[vertex])) for vertex in order),
        edges=tuple(sorted(((number[u], number[v], index) for u, v, index in edges), key=lambda e: (e[1], e[0]))),
    )


def ancestors(successors: Sequence[Sequence[int]]) -> list[int]:
    """Returns for each vertex the bit mask of all that reach it. Vertices come after their successors."""
    reaching = [0] * len(successors)
    for v in reversed(range(len(successors))):
        for w in successors[v]:
            reaching[w] |= reaching[v] | 1 << v
    return reaching


def descendants(successors: Sequence[Sequence[int]]) -> list[int]:
    """Returns for each vertex the bit mask of all that it reaches. Vertices come after their successors."""
    reached: list[int] = []
    for heads in successors:
        mask = 0
        for head in heads:
            mask |= reached[head] | 1 << head
        reached.append(mask)
    return reached


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
