"""The kernel that labels vertices, against the same with lists and dicts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from piper_ray.engine.kernels.labels import (
    BEHIND,
    IN_FRONT,
    INSIDE,
    OUTSIDE,
    WIDEST,
    EdgesOfVertices,
    LabelledMoves,
    label_vertices,
)
from piper_ray.engine.lattice.labelling import BORDER_LABELS, SET_LABELS, STAGE_LABELS
from piper_ray.engine.lattice.layer_graph import offsets
from tests.lengths import long_after

Edge = tuple[int, int]
Move = tuple[int, int, int, list[int], list[int]]
"""Target, source, label, and what the stage and those in front of it pay."""


@pytest.mark.parametrize("labels", [STAGE_LABELS, BORDER_LABELS, SET_LABELS])
@pytest.mark.parametrize("seed", long_after(5, range(40)))
def test_moves_are_those_of_lists(seed: int, labels: tuple[int, ...]) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 9))
    edges = [(tail, head) for tail in range(size) for head in range(tail) if rng.random() < 0.4]
    order = rng.permutation(size)
    found = label_vertices(order, _near(size, edges), np.array(labels), 10**6)
    states, lengths, moves = _slowly_labelled(order.tolist(), edges, labels)
    assert found.states.tolist() == states
    assert found.move_start.tolist() == offsets(lengths).tolist()
    listed = zip(found.target.tolist(), found.source.tolist(), found.label.tolist(), *_charges(found), strict=True)
    assert [*listed] == moves
    for most, fits in ((len(moves), True), (len(moves) - 1, False)):
        assert (label_vertices(order, _near(size, edges), np.array(labels), most).states.size > 0) == fits


@pytest.mark.parametrize(("ends", "fits"), [(WIDEST, True), (WIDEST + 1, False)])
def test_a_frontier_may_have_as_many_vertices_as_a_word_has_labels(ends: int, fits: bool) -> None:
    """All vertices of a row read the last vertex of the order, so all stay open. Along the row the label changes once
    at most, so there are few states."""
    edges = [(v + 1, v) for v in range(ends - 1)] + [(ends, v) for v in range(ends)]
    found = label_vertices(np.arange(ends + 1), _near(ends + 1, edges), np.array(BORDER_LABELS), 10**6)
    assert (found.states.size > 0) == fits
    if fits:
        assert found.states.max() == ends + 1


def _near(size: int, edges: list[Edge]) -> EdgesOfVertices:
    pairs = sorted([(v, w, e, 1) for e, (v, w) in enumerate(edges)] + [(w, v, e, 0) for e, (v, w) in enumerate(edges)])
    counts = np.bincount([v for v, *_ in pairs], minlength=size)
    columns = np.array([pair[1:] for pair in pairs], np.int64).reshape(-1, 3).T
    return EdgesOfVertices(offsets(counts.tolist()), *(column.copy() for column in columns))


def _charges(found: LabelledMoves) -> tuple[list[list[int]], list[list[int]]]:
    ways = ((found.charge_start, found.charge), (found.front_start, found.front))
    of_moves, of_front = ([part.tolist() for part in np.split(values, start[1:-1])] for start, values in ways)
    return of_moves, of_front


class _Paid(NamedTuple):
    by_stage: list[int]
    in_front: list[int]


def _slowly_labelled(
    order: list[int], edges: list[Edge], possible: tuple[int, ...]
) -> tuple[list[int], list[int], list[Move]]:
    """The number of states before each vertex and at the end, the number of moves of each, and the moves."""
    near = {v: sorted({*(w for x, w in edges if x == v), *(x for x, w in edges if w == v)}) for v in order}
    frontier = list[int]()
    states: list[tuple[int, ...]] = [()]
    counts, lengths, moves = [1], list[int](), list[Move]()
    for k, v in enumerate(order):
        later = {*order[k + 1 :]}
        number = dict[tuple[int, ...], int]()
        found = list[Move]()
        for source, labels in enumerate(states):
            known = dict(zip(frontier, labels, strict=True))
            for label in possible:
                paid = _paid(v, label, {w: known[w] for w in near[v] if w in known}, edges)
                if paid is not None:
                    after = {w: at for w, at in {**known, v: label}.items() if later.intersection(near[w])}
                    target = number.setdefault(tuple(after.values()), len(number))
                    found.append((target, source, label, *paid))
        frontier = [w for w in (*frontier, v) if later.intersection(near[w])]
        moves += sorted(found)
        states = [*number]
        counts.append(len(states))
        lengths.append(len(found))
    return counts, lengths, moves


def _paid(v: int, label: int, ends: dict[int, int], edges: list[Edge]) -> _Paid | None:
    """None if a label rises along an edge."""
    paid = _Paid([], [])
    for w, other in ends.items():
        edge, tail, head = (
            (edges.index((v, w)), label, other) if (v, w) in edges else (edges.index((w, v)), other, label)
        )
        if tail < head != OUTSIDE:
            return None
        if tail == INSIDE and head in (BEHIND, OUTSIDE):
            paid.by_stage.append(2 * edge + 1)
        elif tail in (IN_FRONT, OUTSIDE) and head == INSIDE:
            paid.by_stage.append(2 * edge)
        if tail == IN_FRONT and head != IN_FRONT:
            paid.in_front.append(2 * edge + 1)
    return paid
