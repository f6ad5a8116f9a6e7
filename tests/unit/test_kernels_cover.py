"""The most expensive stage costs at least as much as all; dual prices in a box are the best for the known stages."""

from __future__ import annotations

from random import Random

import numpy as np
import numpy.typing as npt
import pytest

from piper_ray.engine.evaluation.dual_prices import _BoxProgram
from piper_ray.engine.kernels.cover import StageKinds, dearest_stage, least_spent_s
from piper_ray.engine.kernels.types import frozen
from piper_ray.engine.lattice.labelling import Labelling
from tests.instances import random_instance
from tests.kernel_support import case, random_case
from tests.lengths import long_after


@pytest.mark.parametrize("seed", long_after(1, range(6)))
def test_dearest_stage_is_that_of_all_stages(seed: int) -> None:
    """Against all pairs of downsets, with so many cells that no two partial stages share one, and with few."""
    rng = Random(seed)
    made = case(random_instance(seed, most_layers=6))
    graph = made.whole.graph
    labelling = Labelling.of(graph)
    assert labelling is not None
    edges_s = [np.array([rng.uniform(0, 2) for _ in graph.edges]) for _ in range(2)]
    weight_s = np.array([[rng.uniform(0.5, 3) for _ in range(graph.size)] for _ in range(2)])
    weight_s[1, rng.randrange(graph.size)] = np.inf
    budget_s = np.array([rng.uniform(2, 10) for _ in range(2)])
    devices = np.array([1, 3])
    price = np.array([rng.uniform(0, 1) for _ in range(graph.size)])
    kinds = frozen(
        StageKinds(devices, np.array([0, 0]), weight_s, budget_s, labelling.charges.seconds(*edges_s)[None, :].copy())
    )
    expected = 0.0
    for i, j in made.pairs():
        outer, inner = made.sets[i], made.sets[j]
        stage = outer - inner
        paid_s = sum(edges_s[0][e] for e, (u, v, _) in enumerate(graph.edges) if v in stage and u not in outer)
        paid_s += sum(edges_s[1][e] for e, (u, v, _) in enumerate(graph.edges) if u in stage and v in inner)
        for kind in range(2):
            if sum(weight_s[kind, v] for v in stage) + paid_s <= budget_s[kind]:
                expected = max(expected, sum(price[v] for v in stage) / devices[kind])
    for cells in (1_000_003, 5):
        inside = np.zeros(graph.size, np.bool_)
        ratio, kind = dearest_stage(labelling.moves, kinds, cells, price, 1e-9, np.ones(2), inside)
        if expected == 0.0:
            assert cells < 100 or kind == -1
            continue
        assert ratio >= expected * (1 - 1e-9)
        assert price[inside].sum() / devices[kind] == pytest.approx(ratio)
        if cells > 100:
            assert ratio == pytest.approx(expected)
            above = dearest_stage(labelling.moves, kinds, cells, price, ratio * 1.001, np.ones(2), inside)
            assert above == (ratio * 1.001, -1)
            again = dearest_stage(labelling.moves, kinds, cells, price, ratio * 0.999, np.ones(2), inside)
            assert again[0] == pytest.approx(ratio)
            assert again[1] == kind


@pytest.mark.parametrize("seed", long_after(5, range(20)))
def test_least_spent_is_that_of_the_stage_itself(seed: int) -> None:
    """Any set of vertices, against all pairs of downsets that have it between them."""
    rng = Random(seed)
    made = random_case(seed, most_layers=6)
    graph = made.whole.graph
    labelling = Labelling.of(graph)
    assert labelling is not None
    incoming_s, outgoing_s = (np.array([rng.uniform(0, 2) for _ in graph.edges]) for _ in range(2))
    weight_s = np.array([rng.uniform(0.5, 3) for _ in range(graph.size)])
    weight_s, charge_s = frozen((weight_s, labelling.charges.seconds(incoming_s, outgoing_s)))
    between: dict[frozenset[int], set[float]] = {}
    for i, j in [*made.pairs(), *((i, i) for i in range(len(made.sets)))]:
        outer, inner = made.sets[i], made.sets[j]
        stage = outer - inner
        spent_s = sum(weight_s[v] for v in stage)
        spent_s += sum(incoming_s[e] for e, (u, v, _) in enumerate(graph.edges) if v in stage and u not in outer)
        spent_s += sum(outgoing_s[e] for e, (u, v, _) in enumerate(graph.edges) if u in stage and v in inner)
        between.setdefault(stage, set()).add(float(spent_s))
    for number in range(2**graph.size):
        stage = frozenset(v for v in range(graph.size) if number >> v & 1)
        inside = np.array([v in stage for v in range(graph.size)])
        found = least_spent_s(labelling.moves, weight_s, charge_s, inside)
        assert found == pytest.approx(min(between.get(stage, {np.inf})), rel=1e-12)


@pytest.mark.parametrize("seed", long_after(4, range(16)))
def test_dual_prices_in_a_box_are_the_best(seed: int) -> None:
    """They keep every stage and the box; and by duality none is better, as some cover of all vertices costs as much."""
    rng = Random(seed)
    size = rng.randint(1, 12)
    program = _BoxProgram(size)
    lower = np.array([rng.uniform(0, 0.5) for _ in range(size)])
    upper = lower + np.array([rng.uniform(0.1, 2) for _ in range(size)])
    stages: list[tuple[npt.NDArray[np.bool_], float]] = []
    for _ in range(4):
        for _ in range(rng.randint(1, 10)):
            inside = np.array([rng.random() < 0.4 for _ in range(size)])
            devices = float(rng.randint(1, 4)) + lower[inside].sum()
            assert program.add(inside, devices) == all(devices != d or (inside != s).any() for s, d in stages)
            stages.append((inside, devices))
        price = program.solve(lower, upper)
        assert (price >= lower).all()
        assert (price <= upper).all()
        for inside, devices in stages:
            assert price[inside].sum() <= devices + 1e-6
        cost = sum(program._cost[column] * share for column, share in zip(program._basis, program._share, strict=True))
        assert price.sum() == pytest.approx(cost, rel=1e-5)
