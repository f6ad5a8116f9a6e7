"""The contracted layer graph with layers numbered for the lattice."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from piper_ray.lattice.contraction import Contraction
from piper_ray.model import Instance


@dataclass(frozen=True)
class LayerGraph:
    """Vertices 0..n-1, numbered so that every successor of a vertex has a smaller number than the vertex itself.

    layer_ids: the (kept) layer of each vertex. successors, predecessors: vertex numbers, ascending.
    edges: (tail, head, index into instance.edges), ordered by (head, tail).
    """

    layer_ids: tuple[int, ...]
    successors: tuple[tuple[int, ...], ...]
    predecessors: tuple[tuple[int, ...], ...]
    edges: tuple[tuple[int, int, int], ...]

    @property
    def size(self) -> int:
        return len(self.layer_ids)


def build_graph(instance: Instance, contraction: Contraction) -> LayerGraph:
    """Numbers the kept layers from the back: smallest file position first among those whose successors are numbered.

    Edges inside a merged group vanish; contraction never makes two edges between the same pair.
    """
    kept = [layer.id for layer in instance.layers if layer.id not in contraction.keeper]
    position = {layer_id: index for index, layer_id in enumerate(kept)}
    edges = []
    for index, edge in enumerate(instance.edges):
        tail = contraction.keeper.get(edge.source, edge.source)
        head = contraction.keeper.get(edge.target, edge.target)
        if tail != head:
            edges.append((position[tail], position[head], index))
    return number_graph(kept, edges)


def number_graph(ids: Sequence[int], edges: Iterable[tuple[int, int, int]]) -> LayerGraph:
    """The graph of ``ids`` with edges (position of the tail, of the head, index), numbered as ``build_graph`` says."""
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


def descendants(successors: Sequence[Sequence[int]]) -> list[int]:
    """For each vertex the bit mask of all it reaches. Vertices come after their successors."""
    reached: list[int] = []
    for heads in successors:
        mask = 0
        for head in heads:
            mask |= reached[head] | 1 << head
        reached.append(mask)
    return reached
