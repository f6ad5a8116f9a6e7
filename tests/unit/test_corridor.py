"""Plans whose stages end near where the best one's do: which downsets count as near, and the answer is the same."""

from __future__ import annotations

import itertools
from contextlib import closing
from random import Random

import numpy as np
import pytest

import piper_ray
from piper_ray.cost.tolerances import PROOF
from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.evaluation.evaluations import Evaluations
from piper_ray.engine.evaluation.threshold import evaluate_threshold
from piper_ray.engine.lattice.layer_graph import members
from piper_ray.engine.ledger import Ledger
from piper_ray.engine.search import search
from piper_ray.engine.search.neighbourhood import around, within
from piper_ray.engine.search.planning import Planning
from piper_ray.engine.search.pricing import Pricing
from piper_ray.engine.search.search import Search
from piper_ray.model.events import Event, IncumbentFound
from piper_ray.model.instance import Instance
from tests.instances import RECOMPUTE, build, tmpc, two_towers
from tests.solver_support import tables


def uneven_towers(towers: int, height: int, seed: int) -> Instance:
    """Side by side, of layers that all differ, between one before and one after all."""
    rng = Random(seed)

    def layer() -> dict[int, list[piper_ray.Tmpc]]:
        p, a = rng.uniform(5, 10), rng.uniform(3, 7)
        return {1: [tmpc(p, 4, a, 6), tmpc(1.3 * p, 4, a / 5, 6, RECOMPUTE)], 2: [tmpc(0.6 * p, 2, a / 2, 3)]}

    size = towers * height + 2
    edges = dict[tuple[int, int], float]()
    for first in range(1, size - 1, height):
        row = [0, *range(first, first + height), size - 1]
        edges |= {edge: rng.uniform(1, 3) for edge in itertools.pairwise(row)}
    return build({v: layer() for v in range(size)}, edges, devices=14, microbatches=16, memory_bytes=70.0)


@pytest.mark.parametrize(("towers", "height", "seed"), [(2, 14, 12), (3, 6, 11), (4, 4, 5)])
def test_the_same_plan_with_and_without(towers: int, height: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    instance, events = uneven_towers(towers, height, seed), list[Event]()
    without = piper_ray.solve(instance)
    monkeypatch.setattr(search, "_SPENT", 1e-9)
    monkeypatch.setattr(search, "_FEW", 0)
    monkeypatch.setattr(search, "_MANY_LIVE", 1)
    monkeypatch.setattr(Pricing, "wanted", property(lambda _: False))

    def listen(event: Event) -> None:
        events.append(event)

    found = piper_ray.solve(instance, listener=listen)
    assert any(isinstance(event, IncumbentFound) and event.origin == "near" for event in events)
    assert (found.status, found.plan, found.time_per_sample_s) == (
        without.status,
        without.plan,
        without.time_per_sample_s,
    )


@pytest.mark.parametrize(("towers", "height", "seed"), [(2, 9, 5), (3, 4, 4), (3, 5, 6), (1, 16, 7)])
def test_a_search_within_few_downsets_finds_their_best_plan(towers: int, height: int, seed: int) -> None:
    """The twin asks just below each plan until there is none, without limits from both sides."""
    instance = uneven_towers(towers, height, seed)
    made = tables(instance)
    problem = made.problem
    with closing(LocalBackend(1)) as backend:
        searching = Search(Planning(instance, made.contraction), problem, Evaluations(backend), Ledger())
        searching._try(searching.bracket.ceiling)
        assert searching._borders is not None
        first_s = searching._upper_s
        allowed = np.random.default_rng(seed).random(made.lattice.size) < 0.4
        allowed |= around(made.lattice, searching._borders, 0.0)
        best_s, asked, threshold_s = np.inf, within(allowed, problem.cluster.devices), first_s
        while (outcome := evaluate_threshold(problem, backend, threshold_s, completion=asked)).feasible:
            best_s = searching.planning.valued(problem, outcome.stages).value_s
            threshold_s = best_s * (1.0 - PROOF)
        searching._search_within(allowed)
    assert best_s < first_s
    assert best_s * (1.0 - 1e-9) <= searching._upper_s <= best_s * (1.0 + 2 * search._NEARLY)
    assert searching.bracket.lower < best_s  # of these downsets alone, nothing is proved


@pytest.mark.parametrize(("height", "borders"), [(6, 1), (9, 2), (9, 5), (12, 3)])
@pytest.mark.parametrize("share", [0.1, 0.3])
def test_near_is_what_differs_by_few_vertices(share: float, height: int, borders: int) -> None:
    lattice = tables(two_towers(height)).problem.workload.lattice
    bits = lattice.arrays.bits
    chosen = np.linspace(1, lattice.size - 2, borders).astype(np.int64)
    sets = [set(members(row)) for row in bits]
    apart = [min(len(downset ^ sets[border]) for border in chosen) for downset in sets]
    allowed = set(np.flatnonzero(around(lattice, bits[chosen], share)).tolist()) - {0, lattice.size - 1}
    assert allowed >= set(chosen.tolist())
    widest = max(apart[downset] for downset in allowed)
    assert allowed == {d for d in range(1, lattice.size - 1) if apart[d] <= widest}
    assert widest == 1 or sum(steps <= widest for steps in apart) <= share * lattice.size
    assert sum(steps <= widest + 1 for steps in apart) > share * lattice.size
