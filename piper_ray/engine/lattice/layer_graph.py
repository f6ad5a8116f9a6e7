"""The contracted layer graph, with layers numbered for the lattice."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from piper_ray.engine.lattice.contraction import Contraction
from piper_ray.model.instance import Instance


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
