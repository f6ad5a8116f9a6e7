"""The stages of a layer graph as labellings of its vertices, one vertex after the other.

A stage I \\ J labels each vertex: BEHIND (in J), INSIDE, or IN_FRONT (outside I). J and I are downsets exactly if along
every edge the label does not rise from tail to head. What the stage pays for an edge depends on the labels of its two
ends. Both conditions concern single edges. So all stages are the paths through a small automaton that labels the
vertices in some order and remembers the labels of the frontier: the vertices with neighbours still to come. Chains have
frontiers of one vertex, forks with their joins of two more.

Sets of vertices that need not be stages, as a rank with several chunks has them, label each vertex INSIDE or OUTSIDE.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from piper_ray.engine.kernels.cover import LabelMoves
from piper_ray.engine.kernels.labels import BEHIND, IN_FRONT, INSIDE, OUTSIDE, EdgesOfVertices, label_vertices
from piper_ray.engine.kernels.types import FloatArray, IndexArray, frozen
from piper_ray.engine.lattice.layer_graph import LayerGraph, offsets

STAGE_LABELS, BORDER_LABELS, SET_LABELS = (BEHIND, INSIDE, IN_FRONT), (BEHIND, IN_FRONT), (INSIDE, OUTSIDE)
"""With the second a labelling is a single border, and its paths are all downsets; with the third, any vertices."""

_MUCH, _SOME, _LITTLE = 1_000_000, 64, 4
"""Weights of the frontier's growth in the choice of an order."""

_MANY_NEIGHBOURS = 8
"""A vertex with more is a hub, such as the embedding of a time step that each block reads."""

_MOST_MOVES = 500_000
"""With more moves, a labelling takes longer than it saves."""


class MoveCharges(NamedTuple):
    """The charges of each move. start: int64[moves + 1], into ``charge``."""

    start: IndexArray
    charge: IndexArray

    def seconds(self, incoming_s: FloatArray, outgoing_s: FloatArray) -> FloatArray:
        """Returns float64[moves]: the cost of each move, given what edges cost the stage of their head and of their
        tail, float64[e]."""
        moves = self.start.size - 1
        of_charge = np.stack([incoming_s, outgoing_s], axis=1).ravel()
        charges_s = np.zeros(moves)
        np.add.at(charges_s, np.repeat(np.arange(moves), np.diff(self.start)), of_charge[self.charge])
        return charges_s


@dataclass(frozen=True)
class Labelling:
    """Labellings of a graph. label: int64[moves], that of the vertex. charges: what each move makes the stage pay: 2 e
    for edge e as it comes in, 2 e + 1 as it leaves. front_charges: the same for the stages in front of it, for edges
    that leave them to it or past it.
    """

    moves: LabelMoves
    label: IndexArray
    charges: MoveCharges
    front_charges: MoveCharges

    @cached_property
    def in_front(self) -> IndexArray:
        """int64[moves]: 1 if the vertex is in front of the border, or of the stage."""
        found: IndexArray = (self.label == IN_FRONT).astype(np.int64)
        return found

    @classmethod
    def of(
        cls, graph: LayerGraph, labels: Sequence[int] = STAGE_LABELS, most_moves: int | None = None
    ) -> Labelling | None:
        """Returns the labelling with the fewest moves of a few orders; None if all have too many moves."""
        neighbours = [sorted({*graph.successors[v], *graph.predecessors[v]}) for v in range(graph.size)]
        few = sorted(range(graph.size), key=lambda v: (len(neighbours[v]), v))[:2]
        starts = dict.fromkeys((0, graph.size - 1, *few))
        from_back, from_front = [-v for v in range(graph.size)], list(range(graph.size))
        ahead = [0] * graph.size  # on the longest path
        for v, heads in enumerate(graph.successors):
            ahead[v] = 1 + max((ahead[w] for w in heads), default=0)
        last, near_back = graph.size - 1, [-steps for steps in _steps_from(0, neighbours)]
        ways = ((last, from_front, _SOME), (last, ahead, _LITTLE), (0, near_back, _SOME))
        found = [min(_order_from(start, neighbours, from_back, _MUCH) for start in starts)]
        found += [_order_from(start, neighbours, priority, weight) for start, priority, weight in ways]
        near = _edges_of(graph, neighbours)
        best: Labelling | None = None
        for _, order in sorted(found):
            most = (most_moves or _MOST_MOVES) if best is None else best.label.size
            best = _moves(order, near, labels, most) or best
        return best


def _steps_from(start: int, neighbours: Sequence[Sequence[int]]) -> list[int]:
    """Returns how many edges, in any direction, are between ``start`` and each vertex, on ways around hubs. So the two
    ends of a U-Net's long edges are about as far away."""
    steps, near = [len(neighbours)] * len(neighbours), deque([start])
    steps[start] = 0
    while near:
        v = near.popleft()
        for w in neighbours[v] if v == start or len(neighbours[v]) <= _MANY_NEIGHBOURS else ():
            if steps[w] == len(neighbours):
                steps[w] = steps[v] + 1
                near.append(w)
    return steps


def _order_from(
    start: int, neighbours: Sequence[Sequence[int]], priority: Sequence[int], weight: int
) -> tuple[int, list[int]]:
    """Returns an order that begins with ``start`` and keeps the frontier small, and its cost: states summed over all
    steps.

    The next vertex is the one of highest priority, after subtracting ``weight`` for each vertex by which the frontier
    grows; of equals the one of highest priority, then the first.
    """
    left = [len(of_vertex) for of_vertex in neighbours]  # neighbours that are not in the order yet
    closes = [0] * len(neighbours)  # vertices that leave the frontier when this one comes
    todo = set(range(len(neighbours)))
    # With an empty frontier any vertex can come next: first those without neighbours.
    apart = iter(sorted(todo, key=lambda v: (bool(neighbours[v]), v)))
    order: list[int] = []
    cost, frontier = 0, 0

    def ranked(u: int) -> tuple[int, int, int]:
        return weight * ((left[u] > 0) - closes[u]) - priority[u], -priority[u], u

    near = [ranked(start)]  # a heap; a vertex has an entry for each rank that it had
    while todo:
        while near and (near[0][2] not in todo or near[0] != ranked(near[0][2])):
            heappop(near)
        v = heappop(near)[2] if near else next(u for u in apart if u in todo)
        todo.remove(v)
        order.append(v)
        frontier += left[v] > 0
        changed = set[int]()
        for w in neighbours[v]:
            left[w] -= 1
            if w in todo:
                changed.add(w)
            elif left[w] == 0:
                frontier -= 1
        for w in (v, *neighbours[v]):
            if w not in todo and left[w] == 1:
                last = next(u for u in neighbours[w] if u in todo)
                closes[last] += 1
                changed.add(last)
        for u in changed:
            heappush(near, ranked(u))
        cost += 3 ** min(frontier, 30)
    return cost, order


def _moves(order: Sequence[int], near: EdgesOfVertices, labels: Sequence[int], most: int) -> Labelling | None:
    """Returns the labelling in this order; None if it has more than ``most`` moves, or too wide a frontier."""
    of_order = np.array(order, np.int64)
    found = label_vertices(of_order, near, np.array(labels, np.int64), most)
    if found.states.size == 0:
        return None
    states, move_start, source, target, label, *charges = found
    inside = (label == INSIDE).astype(np.int64)
    moves = LabelMoves(of_order, states, move_start, source, target, inside)
    return Labelling(frozen(moves), label, MoveCharges(*charges[:2]), MoveCharges(*charges[2:]))


def _edges_of(graph: LayerGraph, neighbours: Sequence[Sequence[int]]) -> EdgesOfVertices:
    edge_of = {(tail, head): e for e, (tail, head, _) in enumerate(graph.edges)}
    pairs = [(v, w) for v, near in enumerate(neighbours) for w in near]
    is_head = [pair in edge_of for pair in pairs]
    edges = [edge_of[(v, w) if out else (w, v)] for (v, w), out in zip(pairs, is_head, strict=True)]
    return frozen(
        EdgesOfVertices(
            offsets(map(len, neighbours)),
            np.array([w for _, w in pairs], np.int64),
            np.array(edges, np.int64),
            np.array(is_head, np.int64),
        )
    )
