"""Which tails leave room to the stages in front of them, against all ways through the lattice; and plans that fit."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from piper_ray.engine.flush.space import SearchSpace
from piper_ray.engine.flush.task_search import ChosenStages, TaskEffort, run_task
from piper_ray.engine.flush.tasks import DegreePair
from piper_ray.engine.kernels.flush_room import least_held_bytes, tails_with_room
from piper_ray.engine.kernels.flush_stages import in_flight
from piper_ray.engine.kernels.flush_types import FlushTables, FlushTask
from tests.flush_schedules import FlushSchedule
from tests.instances import random_instance
from tests.lengths import long_after
from tests.unit.test_flush_limits import tables
from tests.unit.test_kernels_flush import tasks_of

_SHARES = (0.3, 0.6, 0.8, 1.0)
"""Of the memory of the random instances."""


@pytest.mark.parametrize("schedule", long_after(1, FlushSchedule.flushed()))
def test_tails_with_room_against_all_ways(schedule: FlushSchedule) -> None:
    shorter = none = 0
    for seed, arrays, task in _tight(schedule):
        held_bytes = least_held_bytes(arrays, task.arrays)
        most = tails_with_room(arrays, task.arrays, held_bytes)
        assert most.tolist() == _most_with_room(arrays, task.arrays), seed
        shorter += int(np.count_nonzero((most >= 0) & (most < task.arrays.most_stages)))
        none += most[0] < 0
    assert shorter > 100
    assert none > 20


@pytest.mark.parametrize("schedule", long_after(1, FlushSchedule.flushed()))
def test_a_plan_that_fits_is_found_where_there_is_one(schedule: FlushSchedule) -> None:
    found, none = 0, 0
    for seed, arrays, task in _tight(schedule):
        if task.arrays.stages > 0:
            continue
        space, control = SearchSpace(arrays), np.array([np.inf, 0.0])
        best = run_task(space, task, control.copy()).found
        any_plan = run_task(space, task, control.copy(), TaskEffort.FIT)
        assert (any_plan.lower_s == np.inf) == (best is None), seed
        assert (any_plan.found is None) == (best is None), seed
        none += best is None
        if best is not None and any_plan.found is not None:
            found += 1
            assert any_plan.found.value_s >= best.value_s * (1.0 - 1e-9)
            _assert_fits(arrays, any_plan.found)
    assert found > 30
    assert none > 20


@cache
def _tight(schedule: FlushSchedule) -> tuple[tuple[int, FlushTables, DegreePair], ...]:
    found = []
    for seed in range(24):
        for share in _SHARES:
            instance = random_instance(seed, most_layers=6)
            instance = instance.replace(memory_bytes=share * instance.memory_bytes)
            workload, _ = tables(instance)
            if workload is not None:
                found += [(seed, workload.arrays, task) for task in tasks_of(instance, workload, schedule)]
    return tuple(found)


def _most_with_room(arrays: FlushTables, task: FlushTask) -> list[int]:
    """For each downset the most stages behind from which some way of stages that fit leads to all layers."""
    m = len(arrays.bits)

    @cache
    def leads_on(j: int, behind: int) -> bool:
        if j == m - 1:
            return behind <= task.most_stages
        return behind < task.most_stages and any(
            _fits(i, j, behind) and leads_on(i, behind + 1) for i in range(j + 1, m)
        )

    @cache
    def _fits(i: int, j: int, behind: int) -> bool:
        outer, inner = _layers(arrays, i), _layers(arrays, j)
        if not inner < outer:
            return False
        y = in_flight(task.schedule, task.microbatches, behind)
        return any(_least_bytes(r, outer - inner, y) <= task.memory_bytes[r] for r in task.variants.tolist())

    def _least_bytes(r: int, layers: frozenset[int], y: int) -> float:
        return sum(
            min((_held(o, y) for o in range(*arrays.option_start[r, v : v + 2].tolist())), default=np.inf)
            for v in layers
        )

    def _held(o: int, y: int) -> float:
        shared = arrays.option_shared[o] / task.data_parallel_degree
        return float(arrays.option_activation[o] * y + arrays.option_fixed[o] + shared)

    return [max((b for b in range(task.most_stages + 1) if leads_on(j, b)), default=-1) for j in range(m)]


def _assert_fits(arrays: FlushTables, plan: ChosenStages) -> None:
    task, p = plan.task, plan.stages
    layers = [v for options in plan.options for v in options[:, 0].tolist()]
    assert sorted(layers) == [*range(arrays.option_start.shape[1] - 1)]
    for k, (r, options) in enumerate(zip(plan.variant.tolist(), plan.options, strict=True)):
        y = in_flight(task.schedule, task.microbatches, p - 1 - k)
        chosen = arrays.option_start[r, options[:, 0]] + options[:, 1]
        held = arrays.option_activation[chosen] * y + arrays.option_fixed[chosen]
        held += arrays.option_shared[chosen] / task.data_parallel_degree
        assert held.sum() <= task.memory_bytes[r] * (1.0 + 1e-12)


def _layers(arrays: FlushTables, i: int) -> frozenset[int]:
    layers = arrays.option_start.shape[1] - 1
    return frozenset(v for v in range(layers) if int(arrays.bits[i, v >> 6]) >> (v & 63) & 1)
