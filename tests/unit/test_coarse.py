"""An early plan on a long chain: borders are looked at coarsely, then near the best plan's; the answer is the same."""

from __future__ import annotations

from contextlib import closing
from random import Random

import numpy as np
import pytest

import piper_ray
from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.evaluation.outcome import TracedStage
from piper_ray.engine.evaluation.threshold import evaluate_threshold
from piper_ray.engine.lattice.bits import members
from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.lattice.downsets import Lattice, chain_lattice
from piper_ray.engine.lattice.layer_graph import build_graph
from piper_ray.engine.search import neighbourhood
from piper_ray.engine.search.neighbourhood import every, finer, first_spacing, is_long_chain, near, within
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
    """A chain in which every tenth layer has another beside it."""
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


def test_near_takes_all_downsets_of_a_size() -> None:
    lattice = tables(ladder(400)).problem.workload.lattice
    sizes = [len(members(row)) for row in lattice.arrays.bits]
    border = sizes.index(201)
    allowed = near(lattice, [TracedStage(lattice.size - 1, border, 0, 1, 0, 1.0)], 4)
    found = [v for v in range(1, lattice.size - 1) if allowed[v]]
    assert found == [v for v in range(1, lattice.size - 1) if sizes[v] in range(185, 218, 4)]
    coarse = every(lattice, 5)
    assert [v for v in range(1, lattice.size - 1) if coarse[v]] == [
        v for v in range(1, lattice.size - 1) if sizes[v] % 5 == 0
    ]


def test_borders_get_finer_around_the_plan() -> None:
    lattice = lattice_of(chain(600, 1))
    spacing = first_spacing(lattice)
    assert spacing == 3
    assert np.flatnonzero(every(lattice, spacing)).tolist() == [*range(0, 600, 3), 600]
    assert (finer(4), finer(3), finer(2), finer(1)) == (2, 1, 1, 0)
    stages = [TracedStage(outer, inner, 0, 1, 0, 1.0) for outer, inner in ((600, 303), (303, 0))]
    assert np.flatnonzero(near(lattice, stages, 2)).tolist() == [*range(0, 9, 2), *range(295, 312, 2), 600]


def test_a_plan_keeps_to_the_borders_that_are_allowed() -> None:
    made = tables(chain(40, 1), contraction=without_contraction())
    allowed = every(made.problem.workload.lattice, 8)
    with closing(LocalBackend(1)) as backend:
        outcome = evaluate_threshold(made.problem, backend, 1e3, completion=within(allowed, 24))
    assert outcome.feasible
    assert {stage.inner for stage in outcome.stages} <= set(range(0, 41, 8))
