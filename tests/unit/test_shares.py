"""What ranks hold at least, and the bound that comes of it: against schedules and all ways to share out layers."""

from __future__ import annotations

import itertools
import math
from random import Random

import numpy as np
import pytest

from piper_ray.cost.shares import HeldLayers, surely_in_flight
from piper_ray.engine.chunks.tasks import PipelineShape
from piper_ray.model.schedule import FLUSHED, Schedule, ScheduleName
from piper_ray.simulate.actions import ActionKind, flush_lists

SCHEDULES = (
    Schedule(ScheduleName.ONE_F_ONE_B),
    Schedule(ScheduleName.GPIPE),
    *(Schedule(ScheduleName.INTERLEAVED, v) for v in (1, 2, 3, 4)),
    Schedule(ScheduleName.INTERLEAVED, 2, 6),
    Schedule(ScheduleName.LOOPED_BFS, 2),
    *(Schedule(ScheduleName.ZB_H1, v) for v in (1, 2, 3)),
)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_each_chunk_has_as_much_in_flight_at_some_moment(p: int, schedule: Schedule) -> None:
    exact = schedule.name in FLUSHED
    for m in range(1, 3 * p + 2):
        if not PipelineShape(schedule, p, m).runs:
            continue
        expected = surely_in_flight(schedule, p, m)
        for rank, actions in enumerate(flush_lists(schedule, p, m)):
            held, most = [0] * schedule.v, 0
            for kind, chunk, _ in actions.tolist():
                held[chunk] += 0 if kind == ActionKind.I else 1 if kind == ActionKind.F else -1
                most = max(most, min(held))
            assert most == expected[rank] if exact else most >= expected[rank], (m, rank, most)


def test_no_way_to_share_out_layers_is_faster_than_the_bound() -> None:
    """And often the bound says more than the work alone."""
    sharper = sum(is_sharper(Random(seed)) for seed in range(60))
    assert sharper > 10


def test_few_ranks_bound_no_more_than_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """And often more than the work alone; whether the layers fit at all is the same question."""
    rng, sharper = np.random.default_rng(4), 0
    for _ in range(40):
        held = HeldLayers(np.array([1.0, 9.0, 30.0]), *(rng.random(shape) for shape in ((3,), (3, 2), (3, 2))))
        flight, memory_bytes = np.arange(9, 0, -1.0), rng.uniform(12, 20)
        of_all_s = held.least_s(flight, memory_bytes)
        with monkeypatch.context() as patch:
            patch.setattr("piper_ray.cost.shares._MOST_BYTES", 0)
            patch.setattr("piper_ray.cost.shares._FEW_RANKS", 4)
            of_few_s = held.least_s(flight, memory_bytes)
        assert of_few_s <= of_all_s * (1.0 + 1e-12)
        assert np.isinf(of_few_s) == np.isinf(of_all_s)
        sharper += int(held.seconds @ held.counts / 9 * 1.01 < of_few_s < np.inf)
    assert sharper > 1


def is_sharper(rng: Random) -> bool:
    kinds, ranks = rng.randint(1, 3), rng.randint(1, 3)
    counts = np.array([float(rng.randint(1, 2)) for _ in range(kinds)])
    seconds = np.array([rng.choice([0.0, rng.uniform(0, 4)]) for _ in range(kinds)])
    fixed, activation = (np.array([[rng.uniform(0, 3), rng.uniform(0, 3)] for _ in range(kinds)]) for _ in range(2))
    flight = np.arange(ranks, 0, -1.0)
    memory_bytes = rng.uniform(2, 15)
    layers = [kind for kind, count in enumerate(counts) for _ in range(int(count))]
    best_s = math.inf
    for of_layer in itertools.product(range(ranks), repeat=len(layers)):
        for choice in itertools.product(range(2), repeat=len(layers)):
            held, busy_s = np.zeros(ranks), np.zeros(ranks)
            for kind, rank, tmpc in zip(layers, of_layer, choice, strict=True):
                held[rank] += fixed[kind, tmpc] + flight[rank] * activation[kind, tmpc]
                busy_s[rank] += seconds[kind]
            if held.max() <= memory_bytes:
                best_s = min(best_s, float(busy_s.max()))
    shared_out = HeldLayers(counts, seconds, fixed, activation)
    bound_s = shared_out.least_s(flight, memory_bytes)
    assert shared_out.whole_s(ranks) <= best_s
    assert bound_s <= best_s * (1.0 + 1e-12)
    return bool(bound_s > counts @ seconds / ranks * 1.01)


def test_some_of_several_ways_have_the_bounds_that_they_have_among_all() -> None:
    rng = np.random.default_rng(3)
    held = HeldLayers(np.array([1.0, 30.0]), rng.random((7, 2)), rng.random((7, 2, 3)), rng.random((7, 2, 3)))
    ways, flight = rng.random(7) < 0.5, np.arange(4, 0, -1.0)
    assert held.only(ways).least_s(flight, 22.0) == pytest.approx(held.least_s(flight, 22.0)[ways], rel=1e-12)
    assert held.only(ways).whole_s(4) == pytest.approx(held.whole_s(4)[ways])
