"""An early plan on a long chain: of the cheapest cuts, then of those near its own borders; the answer is the same."""

from __future__ import annotations

from contextlib import closing
from random import Random

import numpy as np
import pytest

import piper_ray
from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.evaluation.outcome import TracedStage
from piper_ray.engine.evaluation.threshold import evaluate_threshold
from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.lattice.downsets import Lattice, chain_lattice
from piper_ray.engine.lattice.layer_graph import build_graph, members
from piper_ray.engine.search import neighbourhood
from piper_ray.engine.search.neighbourhood import cheapest_cuts, finer, first_spacing, is_long_chain, near, within
from piper_ray.engine.tables.problem import Problem
from piper_ray.model.events import Event, IncumbentFound
from piper_ray.model.instance import Instance
from tests.instances import RECOMPUTE, build, tmpc, two_towers
from tests.solver_support import tables


def chain(layers: int, seed: int, memory_bytes: float = 60.0) -> Instance:
    rng = Random(seed)

    def layer() -> dict[int, list[piper_ray.Tmpc]]:
        p, w, a, b = (value * rng.uniform(0.98, 1.02) for value in (8.0, 4.0, 3.0, 6.0))
        return {
            t: [
                tmpc(p * (1 / t + 0.05), w / t, a / t, b / t),
                tmpc(1.3 * p * (1 / t + 0.05), w / t, a / t / 6, b / t, RECOMPUTE),
            ]
            for t in (1, 2)
        }

    edges = {(v, v + 1): rng.uniform(0.4, 0.6) for v in range(layers - 1)}
    return build({v: layer() for v in range(layers)}, edges, devices=24, microbatches=24, memory_bytes=memory_bytes)


@pytest.mark.parametrize(("seed", "memory_bytes"), [(1, 60.0), (2, 90.0), (3, 1e6), (4, 30.0)])
def test_the_same_plan_with_and_without(seed: int, memory_bytes: float, monkeypatch: pytest.MonkeyPatch) -> None:
    instance, events = chain(140, seed, memory_bytes), list[Event]()

    def listen(event: Event) -> None:
        events.append(event)

    found = piper_ray.solve(instance, listener=listen)
    first = next((event for event in events if isinstance(event, IncumbentFound)), None)
    assert first is None or first.origin == "chain"
    monkeypatch.setattr(neighbourhood, "is_long_chain", lambda _: False)
    without = piper_ray.solve(instance)
    assert (found.status, found.plan, found.time_per_sample_s) == (
        without.status,
        without.plan,
        without.time_per_sample_s,
    )


def ladder(layers: int) -> Instance:
    """A chain in which every tenth layer has another one parallel to it."""
    edges = {(v, v + 1): 0.5 for v in range(layers - 1) if v % 10 not in (4, 5)}
    for v in range(4, layers - 2, 10):
        edges |= {(v - 1, v + 1): 0.5, (v, v + 2): 0.5, (v + 1, v + 2): 0.5}
    return build({v: {1: [tmpc(1)]} for v in range(layers)}, edges, devices=8, microbatches=8, memory_bytes=1e6)


def lattice_of(instance: Instance) -> Lattice:
    graph = build_graph(instance, without_contraction())
    return chain_lattice(graph, range(graph.size))


def test_only_long_chains_are_begun_so() -> None:
    assert is_long_chain(lattice_of(chain(140, 1)))
    assert not is_long_chain(lattice_of(chain(60, 1)))


def test_what_is_nearly_a_chain_is_begun_so_where_it_is_longer() -> None:
    assert is_long_chain(tables(ladder(1000)).problem.workload.lattice)
    assert not is_long_chain(tables(ladder(800)).problem.workload.lattice)
    assert not is_long_chain(tables(two_towers(60)).problem.workload.lattice)


def cuts_by_hand(problem: Problem, spacing: int) -> set[int]:
    """The ends, and of the downsets in each window of sizes the first whose edges to the rest cost hardly more than
    those of the best."""
    lattice = problem.workload.lattice
    edge_s = problem.costs.both_s.min(axis=0)
    windows: dict[int, list[tuple[float, int]]] = {}
    for v in range(lattice.size):
        inside = set(members(lattice.arrays.bits[v]))
        cut = [e for e, (tail, head, _) in enumerate(lattice.graph.edges) if tail not in inside and head in inside]
        windows.setdefault(len(inside) // spacing, []).append((float(sum(edge_s[e] for e in cut)), v))
    first = {next(v for cut_s, v in window if cut_s <= min(window)[0] * 1.1 + 1e-9) for window in windows.values()}
    return first | {0, lattice.size - 1}


@pytest.mark.parametrize(("layers", "spacing"), [(40, 1), (40, 7), (90, 4), (90, 100)])
def test_of_each_window_the_cheapest_cut(layers: int, spacing: int) -> None:
    problem = tables(ladder(layers), contraction=without_contraction()).problem
    assert set(np.flatnonzero(cheapest_cuts(problem, spacing)).tolist()) == cuts_by_hand(problem, spacing)


def test_the_cheapest_cuts_are_between_blocks() -> None:
    """Blocks of five layers with one cheap edge between two blocks."""
    edges = {(v, v + 1): 0.01 if v % 5 == 4 else 1.0 for v in range(99)}
    instance = build({v: {1: [tmpc(1)]} for v in range(100)}, edges, devices=8, microbatches=8, memory_bytes=1e6)
    problem = tables(instance, contraction=without_contraction()).problem
    assert np.flatnonzero(cheapest_cuts(problem, 7)).tolist() == [
        0,
        10,
        15,
        25,
        30,
        35,
        45,
        50,
        60,
        65,
        70,
        80,
        85,
        95,
        100,
    ]


def test_borders_that_cost_the_same_are_spaced_evenly() -> None:
    edges = {(v, v + 1): 1.0 + 0.04 * (v % 3) for v in range(99)}
    instance = build({v: {1: [tmpc(1)]} for v in range(100)}, edges, devices=8, microbatches=8, memory_bytes=1e6)
    problem = tables(instance, contraction=without_contraction()).problem
    assert np.flatnonzero(cheapest_cuts(problem, 4)).tolist() == [*range(0, 101, 4)]


def test_borders_get_finer_around_the_plan() -> None:
    assert first_spacing(lattice_of(chain(600, 1))) == 4
    assert (finer(4), finer(3), finer(2), finer(1)) == (2, 1, 1, 0)
    problem = tables(ladder(400), contraction=without_contraction()).problem
    lattice = problem.workload.lattice
    sizes = [len(members(row)) for row in lattice.arrays.bits]
    border = sizes.index(201)
    stages = [TracedStage(lattice.size - 1, border, 0, 1, 0, 1.0), TracedStage(border, 0, 0, 1, 0, 1.0)]
    for spacing in (4, 1):
        close = {v for v in range(lattice.size) if min(abs(sizes[v] - size) for size in (0, 201)) <= 4 * spacing}
        cuts = cuts_by_hand(problem, spacing) if spacing > 1 else close
        found = set(np.flatnonzero(near(problem, stages, spacing)).tolist())
        assert found == close & cuts | {0, border, lattice.size - 1}


def test_a_plan_keeps_to_the_borders_that_are_allowed() -> None:
    made = tables(chain(40, 1), contraction=without_contraction())
    allowed = cheapest_cuts(made.problem, 8)
    with closing(LocalBackend(1)) as backend:
        outcome = evaluate_threshold(made.problem, backend, 1e3, completion=within(allowed, 24))
    assert outcome.feasible
    assert {stage.inner for stage in outcome.stages} <= cuts_by_hand(made.problem, 8)
