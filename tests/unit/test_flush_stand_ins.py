"""Borders that stand in for others: with them no stage takes longer, unless it is free, and no plan is left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from random import Random

import numpy as np
import pytest

from piper_ray.engine.flush import stand_ins as flush_stand_ins
from piper_ray.engine.flush.path_prices import even_prices
from piper_ray.engine.flush.space import SearchSpace
from piper_ray.engine.flush.stand_in_bound import StandInBound
from piper_ray.engine.flush.stand_ins import StandIns
from piper_ray.engine.flush.tables import FlushWorkload, tables_of_rows
from piper_ray.engine.flush.task_search import TaskEffort, run_task
from piper_ray.engine.flush.tasks import DegreePair
from piper_ray.engine.kernels.types import FloatArray, IndexArray
from piper_ray.engine.lattice.layer_graph import members
from piper_ray.model.instance import Edge, Instance, Layer, Tmpc
from tests.flush_schedules import FlushSchedule
from tests.lengths import long_after
from tests.unit.test_flush_limits import tables
from tests.unit.test_kernels_flush import tasks_of

_SYNC_S_PER_BYTE = 0.3


@pytest.fixture(autouse=True)
def _any_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flush_stand_ins, "_FEWER", 1.0)


@pytest.mark.parametrize("long_share", long_after(1, [0.2, 0.0, 2.0]))
def test_no_stage_takes_longer_with_stand_ins(long_share: float) -> None:
    rng, moved, free = Random(5), 0, 0
    for seed in range(40):
        workload, _ = tables(costly_borders(seed))
        assert workload is not None
        found = StandIns.of_tables(workload.arrays, 0, _SYNC_S_PER_BYTE, long_share)
        if found is None:
            continue
        inside = [set(members(bits)) for bits in workload.arrays.bits]
        start = workload.arrays.option_start[0]
        chosen = np.array([rng.randrange(first, end) for first, end in pairwise(start.tolist())])
        stand_in = found.rows[found.of]
        assert stand_in[0] == 0
        assert stand_in[-1] == len(inside) - 1
        for i, j in product(range(len(inside)), repeat=2):
            if not inside[j] < inside[i]:
                continue
            of_i, of_j = int(stand_in[i]), int(stand_in[j])
            assert inside[of_j] <= inside[of_i]
            inner = found.free.inner[slice(*found.free.start[[found.of[i], found.of[i] + 1]])]
            if found.of[j] in inner:
                free += 1
                continue
            assert of_i != of_j
            stage = inside[i] - inside[j]
            kept = np.array([chosen[v] if v in stage else start[v] for v in range(start.size - 1)])
            before = _seconds(workload, inside[i], inside[j], chosen)
            after = _seconds(workload, inside[of_i], inside[of_j], kept)
            assert (after <= before * (1.0 + 1e-9) + 1e-9).all(), (seed, i, j)
            moved += (i, j) != (of_i, of_j)
    assert moved > 100
    assert free > 100


@pytest.mark.parametrize("schedule", long_after(1, FlushSchedule.flushed()))
def test_no_plan_is_faster_than_their_bound(schedule: FlushSchedule) -> None:
    rng, ruled_out, looked_at = Random(3), 0, 0
    for seed in range(60):
        for workload, task, found, batch_s in _with_stand_ins(seed, schedule, rng):
            space, known = SearchSpace(workload.arrays, is_large=True), replace(task, stand_ins=found)
            for share in (1.0, 1.3, 0.9):
                control = np.array([share * batch_s * (1.0 + 1e-9), 0.0])
                result = run_task(space, known, control, TaskEffort.BOUND)
                assert share < 1.0 or result.lower_s <= batch_s * (1.0 + 1e-9), (seed, task.degrees)
                alone = StandInBound.of(found, workload.arrays, task.arrays, task.ahead)
                left = alone.within(even_prices(task.arrays), float(control[0]), 10**9, control)
                assert left is None or share < 1.0 or not left[0].is_empty, (seed, task.degrees)
                ruled_out += share < 1.0 and result.lower_s == np.inf
                looked_at += left is not None and found.rows.size < found.of.size
    assert ruled_out > 20
    assert looked_at > 60


def test_no_downset_has_less_ahead_or_inside_than_what_stands_in_for_it() -> None:
    rng, less = Random(4), 0
    for seed in range(30):
        for workload, task, found, _ in _with_stand_ins(seed, FlushSchedule.ONE_F_ONE_B, rng):
            ahead, tables_ = task.ahead, tables_of_rows(workload.arrays, found.rows)
            least = found.ahead(tables_, ahead)
            for figure in ("own_s", "ahead_s", "ahead_forward_s", "ahead_activation", "ahead_fixed", "ahead_shared"):
                of_all, of_rows = getattr(ahead, figure), getattr(least, figure)
                assert (of_rows[found.of] <= of_all * (1.0 + 1e-12)).all(), (seed, figure)
                less += (of_rows < of_all[found.rows]).any()
            work_s, least_s = ahead.own_s[found.rows], least.own_s
            rises_s = np.subtract.outer(work_s, work_s)
            assert (np.subtract.outer(least_s, least_s)[rises_s >= 0.0] <= rises_s[rises_s >= 0.0] + 1e-12).all()
    assert less > 20


def costly_borders(seed: int) -> Instance:
    """A small graph of layers with one to three choices, and edges of which some take longer than the layers."""
    rng = Random(seed)
    layers, scale = rng.randint(4, 7), rng.choice([0.5, 3.0, 12.0])
    edges = []
    for head in range(1, layers):
        tails = {head - 1} if rng.random() < 0.6 else set()
        tails |= set(rng.sample(range(head), min(head, rng.choice([1, 1, 2]))))
        edges += [Edge(tail, head, scale * rng.choice([0.1, 1.0, 4.0])) for tail in sorted(tails)]
    into = [{edge.source: 0.0 for edge in edges if edge.target == v} for v in range(layers)]
    out = [{edge.target: 0.0 for edge in edges if edge.source == v} for v in range(layers)]
    choices = rng.choice([1, 1, 3])

    def row(v: int) -> tuple[Tmpc, ...]:
        time_s, weights, activation = rng.choice([0.0, 1.0, 3.0]) * rng.random(), 3.0 * rng.random(), rng.random()
        return tuple(
            Tmpc(f"{k}", time_s * (1.0 + 0.2 * k), weights, activation / (1 + k), rng.random(), into[v], out[v])
            for k in range(choices)
        )

    memory_bytes = rng.choice([1e9, 6.0, 3.0, 2.0])
    return Instance(
        tuple(Layer(v, f"{v}", {1: row(v)}) for v in range(layers)),
        tuple(edges),
        rng.choice([2, 4, 6]),
        rng.choice([2, 4, 8]),
        memory_bytes,
        rng.choice([1.0, 5.0]),
        "costly borders",
    )


def _with_stand_ins(
    seed: int, schedule: FlushSchedule, rng: Random
) -> Iterator[tuple[FlushWorkload, DegreePair, StandIns, float]]:
    instance = costly_borders(seed)
    workload, _ = tables(instance)
    assert workload is not None
    for task in tasks_of(instance, workload, schedule):
        rate = float(task.arrays.sync_s_per_byte[0]) * rng.choice([1.0, 2.0])
        found = StandIns.of_tables(workload.arrays, 0, rate, rng.choice([0.0, 0.2, 0.5, 2.0]))
        plan = run_task(SearchSpace(workload.arrays), task, np.array([np.inf, 0.0])).found
        if found is not None and plan is not None:
            yield workload, task, found, plan.value_s


def _seconds(workload: FlushWorkload, outer: set[int], inner: set[int], chosen: IndexArray) -> FloatArray:
    """Returns a stage's forward and backward seconds, and all with its synchronisation."""
    tables_, stage = workload.arrays, outer - inner
    of_options = (tables_.option_forward_s, tables_.option_backward_s, tables_.option_weights)
    forward_s, backward_s, weights = (sum(float(column[chosen[v]]) for v in stage) for column in of_options)
    paid_s = 0.0
    for e, (tail, head) in enumerate(zip(tables_.edge_tail.tolist(), tables_.edge_head.tolist(), strict=True)):
        paid_s += float(tables_.edge_in_s[0, e]) if head in stage and tail not in outer else 0.0
        paid_s += float(tables_.edge_out_s[0, e]) if tail in stage and head in inner else 0.0
    both_s = forward_s + backward_s + 2.0 * paid_s
    return np.array([forward_s + paid_s, backward_s + paid_s, both_s + weights * _SYNC_S_PER_BYTE])
