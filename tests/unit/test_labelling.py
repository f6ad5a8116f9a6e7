"""The automaton that labels a graph's vertices knows every stage, once, and what it pays at its borders."""

from __future__ import annotations

import numpy as np
import pytest

from piper_ray.engine.lattice import labelling
from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.lattice.labelling import Labelling, _order_from
from piper_ray.engine.lattice.layer_graph import build_graph
from tests.instances import random_instance, two_towers
from tests.kernel_support import case
from tests.lengths import long_after
from tests.operator_graphs import traced_u_net
from tests.solver_support import tables


@pytest.mark.parametrize("seed", long_after(3, range(12)))
def test_paths_are_the_stages_and_what_they_pay(seed: int) -> None:
    made = case(random_instance(seed, most_layers=5))
    graph = made.whole.graph
    found = Labelling.of(graph)
    assert found is not None
    rng = np.random.default_rng(seed)
    incoming_s, outgoing_s = rng.random(len(graph.edges)), rng.random(len(graph.edges))
    charges_s = found.charges.seconds(incoming_s, outgoing_s)
    paths = _paths(found, charges_s)
    expected: dict[frozenset[int], list[float]] = {}
    for i, outer in enumerate(made.sets):
        for inner in made.sets[: i + 1]:
            if inner <= outer:
                stage = outer - inner
                paid = sum(incoming_s[e] for e, (u, v, _) in enumerate(graph.edges) if v in stage and u not in outer)
                paid += sum(outgoing_s[e] for e, (u, v, _) in enumerate(graph.edges) if u in stage and v in inner)
                expected.setdefault(stage, []).append(paid)
    assert paths.keys() == expected.keys()
    for stage, paid_s in paths.items():
        assert sorted(paid_s) == pytest.approx(sorted(expected[stage]))


def _paths(found: Labelling, charges_s: np.ndarray) -> dict[frozenset[int], list[float]]:
    """Every path from the first state to the last, as the stage and what it pays."""
    moves = found.moves
    at: list[tuple[int, frozenset[int], float]] = [(0, frozenset(), 0.0)]
    for k, v in enumerate(moves.order.tolist()):
        of_vertex = range(int(moves.move_start[k]), int(moves.move_start[k + 1]))
        assert [int(moves.target[move]) for move in of_vertex] == sorted(moves.target[list(of_vertex)].tolist())
        at = [
            (int(moves.target[move]), inside | {v} if moves.inside[move] else inside, paid + float(charges_s[move]))
            for state, inside, paid in at
            for move in of_vertex
            if moves.source[move] == state
        ]
    stages: dict[frozenset[int], list[float]] = {}
    for _, inside, paid in at:
        stages.setdefault(inside, []).append(paid)
    return stages


@pytest.mark.parametrize("seed", range(4))
def test_the_next_vertex_makes_the_smallest_frontier(seed: int) -> None:
    """By a look at all vertices at each step."""
    rng = np.random.default_rng(seed)
    for size in range(1, 16):
        ends = rng.integers(size, size=(rng.integers(2 * size), 2)).tolist()
        neighbours = [sorted({x + y - v for x, y in ends if v in (x, y)} - {v}) for v in range(size)]
        priority, weight = rng.integers(6, size=size).tolist(), int(rng.choice([4, 64, 1_000_000]))
        start = int(rng.integers(size))
        cost, order = _order_from(start, neighbours, priority, weight)
        assert order[0] == start
        assert sorted(order) == [*range(size)]
        expected_cost, before = 0, set[int]()
        for v in order:
            near = {w for u in before for w in neighbours[u]} - before
            grown = {u: len(_frontier({*before, u}, neighbours)) for u in range(size)}
            ranks = {u: (weight * grown[u] - priority[u], -priority[u], u) for u in near}
            if near:
                assert v == min(near, key=lambda u: ranks[u])
            before.add(v)
            expected_cost += 3 ** grown[v]
        assert cost == expected_cost


def _frontier(before: set[int], neighbours: list[list[int]]) -> set[int]:
    return {v for v in before if not before.issuperset(neighbours[v])}


def test_two_towers_have_few_states_however_high() -> None:
    graph = tables(two_towers(30)).graph
    found = Labelling.of(graph)
    assert found is not None
    assert found.moves.states.max() <= 27


def test_what_is_too_entangled_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labelling, "_MOST_MOVES", 10)
    assert Labelling.of(tables(two_towers(3)).graph) is None


@pytest.mark.parametrize("labels", [labelling.BORDER_LABELS, labelling.STAGE_LABELS, labelling.SET_LABELS])
def test_u_nets_have_few_states(labels: tuple[int, ...]) -> None:
    """Their long edges, and those of the embedding that all blocks read, are open side by side."""
    graph = build_graph(traced_u_net(4, 2, 1), without_contraction())
    found = Labelling.of(graph, labels)
    assert found is not None
    assert found.label.size < 300 * graph.size


def test_steps_go_around_hubs() -> None:
    """A row of vertices, all of which read one more."""
    row = [[v - 1, v + 1] for v in range(12)]
    near = [[w for w in beside if 0 <= w < 12] + [12] for beside in row] + [[*range(12)]]
    assert labelling._steps_from(0, near) == [*range(12), 1]
