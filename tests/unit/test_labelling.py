"""The automaton that labels a graph's vertices knows every stage, once, and what it pays at its borders."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from piper_ray.engine.lattice import labelling
from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.lattice.labelling import Labelling
from piper_ray.engine.lattice.layer_graph import build_graph
from tests.instances import build, random_instance, tmpc, two_towers
from tests.kernel_support import case
from tests.lengths import long_after
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


@pytest.mark.parametrize("edges", [{}, {(0, v): 1 for v in range(1, 300)}], ids=["apart", "star"])
def test_layers_side_by_side_are_put_in_order_at_once(
    monkeypatch: pytest.MonkeyPatch, edges: dict[tuple[int, int], float]
) -> None:
    """By some looks at each vertex, of which there were as many as pairs."""
    looks = 0

    def counted(found: Iterable[object]) -> bool:
        nonlocal looks
        looks += 1
        return any(found)

    monkeypatch.setattr(labelling, "any", counted, raising=False)
    instance = build({v: {1: [tmpc(1 + v % 7)]} for v in range(300)}, edges)
    assert Labelling.of(build_graph(instance, without_contraction())) is not None
    assert 300 <= looks < 10 * 300


def test_two_towers_have_few_states_however_high() -> None:
    graph = tables(two_towers(30)).graph
    found = Labelling.of(graph)
    assert found is not None
    assert found.moves.states.max() <= 27


def test_what_is_too_entangled_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labelling, "_MOST_MOVES", 10)
    assert Labelling.of(tables(two_towers(3)).graph) is None
