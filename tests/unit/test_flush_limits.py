"""Bounds on single stages under a flush: by dual prices, and by the price of memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from random import Random
from typing import NamedTuple

import numpy as np
import pytest

from piper_ray.cost.variants import stage_variants
from piper_ray.engine.flush import task_search
from piper_ray.engine.flush.mixes import BorderRates
from piper_ray.engine.flush.path_prices import NO_BOUNDS
from piper_ray.engine.flush.paths import often, room
from piper_ray.engine.flush.space import SearchSpace
from piper_ray.engine.flush.stage_limits import PathArrays, build_paths
from piper_ray.engine.flush.tables import FlushWorkload, build_workload, tables_on
from piper_ray.engine.flush.task_search import TaskEffort, run_task
from piper_ray.engine.flush.tasks import DegreePair
from piper_ray.engine.kernels.flush_choices import stage_items
from piper_ray.engine.kernels.flush_paths import simulate_step
from piper_ray.engine.kernels.flush_stages import in_flight, least_figures, look_ahead, priced_time_s
from piper_ray.engine.kernels.flush_states import FINISHED, tails
from piper_ray.engine.kernels.flush_types import GPIPE, NO_FREE_STAGES, ONE_F_ONE_B, ORIGIN, TailArrays
from piper_ray.engine.kernels.types import IndexArray, StageKey, frozen
from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.lattice.downsets import build_lattice, chain_lattice
from piper_ray.engine.lattice.labelling import Labelling
from piper_ray.engine.lattice.layer_graph import build_graph
from piper_ray.model.constraints import Restrictions
from piper_ray.model.instance import Instance
from piper_ray.model.schedule import PAPERS_SCHEDULE
from piper_ray.model.stop import StoppedBy
from tests.flush_schedules import FlushSchedule
from tests.instances import random_instance
from tests.lengths import long_after
from tests.unit.test_kernels_flush import NO_GRID, NO_LEVELS, any_tails, random_pipelines, tasks_of


@pytest.mark.parametrize("schedule", [GPIPE, ONE_F_ONE_B])
def test_no_batch_takes_less_than_its_work_and_its_slowest_stage_ask_for(schedule: int) -> None:
    rng = Random(7)
    for m, stages in random_pipelines(5, 600):
        forward_s, backward_s = stages[:, 0].copy(), stages[:, 1].copy()
        sync_s = np.array([rng.choice([0.0, rng.uniform(0.0, 9.0)]) for _ in stages])
        batch_s = simulate_step(schedule, m, forward_s, backward_s, sync_s)
        times_s = forward_s + backward_s
        for more in (0, 3):
            least_s = times_s.sum() + often(schedule, m, len(stages) + more) * times_s.max() + sync_s[0]
            assert least_s <= batch_s * (1.0 + 1e-12)
            rooms = room(schedule, m, len(stages) + more)
            for behind in range(len(stages) if rooms.size > 0 else 0):
                back_s, front_s = times_s[-1 - behind :].sum(), times_s[: len(stages) - 1 - behind].sum()
                spare_s = (batch_s - sync_s[0] - times_s.sum()) * (1.0 + 1e-9) + 1e-12
                assert times_s[-1 - behind] <= spare_s * (rooms[behind + 1] - rooms[behind])
                assert back_s <= spare_s * rooms[behind + 1]
                assert front_s <= spare_s * (rooms[-1] - rooms[behind + 1]) + 1e-12


def test_that_is_met_by_even_stages() -> None:
    stages = np.ones(4)
    batch_s = simulate_step(GPIPE, 6, stages, stages, np.zeros(4))
    assert 8.0 + often(GPIPE, 6, 4) * 2.0 == pytest.approx(batch_s)


class Searched(NamedTuple):
    """A task on a small lattice, and the time of its best plan."""

    seed: int
    workload: FlushWorkload
    paths: PathArrays
    task: DegreePair
    batch_s: float


@cache
def searched(schedule: FlushSchedule) -> tuple[Searched, ...]:
    """Tasks that have a plan. Of those of the last two seeds limits leave fewer tails."""
    with_plan = []
    for seed in (*range(28), 44, 59):
        instance = random_instance(seed, most_layers=7)
        workload, paths = tables(instance)
        if workload is None or paths is None:
            continue
        for task in tasks_of(instance, workload, schedule):
            found = run_task(SearchSpace(workload.arrays), task, np.array([np.inf, 0.0])).found
            if found is not None:
                with_plan.append(Searched(seed, workload, paths, task, found.value_s))
    return tuple(with_plan)


@pytest.mark.parametrize("schedule", long_after(1, FlushSchedule.flushed()))
def test_limits_leave_all_that_plans_below_a_cutoff_use(schedule: FlushSchedule) -> None:
    fewer = ruled_out = 0
    for one in searched(schedule):
        _, workload, paths, task, batch_s = one
        space = SearchSpace(workload.arrays, True, paths)

        within, _ = space.within(task, np.array([batch_s, 0.0]), lambda: None)
        assert within is not None
        limits = within.most_tails
        every, limited = states_within(one, any_tails(task.arrays, workload)), states_within(one, limits)
        assert figures_of_all(limited, workload) == figures_of_all(every, workload), one.seed
        fewer += len(limited.origin) < len(every.origin)
        below, proved_s = space.within(task, np.array([0.9 * batch_s, 0.0]), lambda: None)
        assert proved_s <= batch_s * (1.0 + 1e-9)
        ruled_out += limits.size if below is None else int((below.most_tails < limits).sum())
    assert fewer > 1
    assert ruled_out > 5


@pytest.mark.parametrize("schedule", long_after(1, FlushSchedule.flushed()))
def test_rounded_states_bound_a_task_and_leave_the_rest_to_exact_ones(
    schedule: FlushSchedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_search, "_FEW_STATES", 0)
    monkeypatch.setattr(task_search, "_SOME_STATES", 0)
    ruled_out = raised = 0
    for seed, workload, paths, task, batch_s in searched(schedule):
        space = SearchSpace(workload.arrays, True, paths)
        for share in (0.9, 0.97, 1.001, 1.2) if batch_s > 0.0 else ():
            control = np.array([batch_s * share, 0.0])
            found = run_task(space, of_space(space, task), control, TaskEffort.ROUNDED)
            if share < 1.0:
                assert not found.is_rounded or found.lower_s <= batch_s, (seed, task.degrees)
                ruled_out += found.lower_s == np.inf
            elif found.is_rounded:
                assert found.found is None
                assert found.lower_s <= batch_s * (1.0 + 1e-9), (seed, task.degrees)
                assert found.left_open is StoppedBy.TOO_MANY_STATES
                raised += found.lower_s > 0.98 * batch_s
            else:  # bounds alone, or a plan that needs no more states
                assert value_s(found) == pytest.approx(batch_s, rel=1e-9)
    assert ruled_out > 20
    assert raised > 10


@pytest.mark.long
@pytest.mark.parametrize("schedule", long_after(1, FlushSchedule.flushed()))
def test_a_task_searched_by_dual_prices_has_the_same_plan(
    schedule: FlushSchedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_search, "_FEW_STATES", 0)
    compared = 0
    for seed, workload, paths, task, batch_s in searched(schedule):
        if batch_s == 0.0:  # no bound tells plans apart
            continue
        for share in (0.97, 1.001, 1.2):
            plain = run_task(SearchSpace(workload.arrays), task, np.array([batch_s * share, 0.0]))
            for space in (SearchSpace(workload.arrays, True, paths), listed_when_wanted(workload, paths)):
                priced = run_task(space, of_space(space, task), np.array([batch_s * share, 0.0]))
                assert (priced.found is None) is (plain.found is None), (seed, task.degrees, share)
                assert value_s(priced) == (plain.found and pytest.approx(plain.found.value_s, rel=1e-9)), seed
            compared += 1
    assert compared > 50


@pytest.mark.long
@pytest.mark.parametrize("schedule", long_after(1, FlushSchedule.flushed()))
def test_along_beams_there_are_plans_and_no_false_bounds(schedule: FlushSchedule) -> None:
    found = best = 0
    for _, workload, paths, task, batch_s in searched(schedule):
        beams = listed_when_wanted(workload, paths).along_beams()
        result = run_task(beams, of_space(beams, task), np.array([1.5 * batch_s, 0.0]), TaskEffort.PLAN)
        assert result.proved_s <= batch_s * (1.0 + 1e-9)
        if result.found is not None:
            found += 1
            best += result.found.value_s <= batch_s * (1.0 + 1e-9)
            assert result.found.value_s >= batch_s * (1.0 - 1e-9)
    assert found > 12
    assert best > found / 2


def listed_when_wanted(workload: FlushWorkload, paths: PathArrays) -> SearchSpace:
    """The same layers, of which no task has all downsets."""
    graph = workload.lattice.graph
    chain = tables_on(chain_lattice(graph, range(graph.size)), workload.arrays, workload.values)
    return SearchSpace(chain, True, paths, graph, workload.values)


def of_space(space: SearchSpace, task: DegreePair) -> DegreePair:
    """With what is left in front of each downset of the space's own tables."""
    return replace(task, ahead=frozen(look_ahead(space.tables, task.arrays)))


def states_within(one: Searched, limits: IndexArray) -> TailArrays:
    """Of tails of plans that take no more than the best one."""
    control = np.array([one.batch_s, 0.0])
    status, states = tails(
        one.workload.arrays,
        one.task.arrays,
        one.task.ahead,
        limits,
        NO_LEVELS,
        NO_GRID,
        NO_BOUNDS,
        NO_FREE_STAGES,
        10**6,
        True,
        control,
    )
    assert status == FINISHED
    return states


def figures_of_all(states: TailArrays, workload: FlushWorkload) -> set[tuple[float, ...]]:
    """The figures of all whole pipelines."""
    whole = states.origin[:, ORIGIN.downset] == workload.lattice.size - 1
    assert whole.any()
    return {tuple(row) for row in states.figures[whole].tolist()}


@pytest.mark.parametrize("schedule", long_after(1, FlushSchedule.flushed()))
def test_no_choice_that_fits_takes_less_than_its_priced_time(schedule: FlushSchedule) -> None:
    rng, dearer = Random(3), 0
    for seed in range(100):
        instance = random_instance(seed, most_layers=5)
        workload, _ = tables(instance)
        for task in [] if workload is None else tasks_of(instance, workload, schedule):
            assert workload is not None
            dearer += _priced_above_least(workload, task, rng)
    assert dearer > 10


def _priced_above_least(workload: FlushWorkload, task: DegreePair, rng: Random) -> int:
    """How often the price of memory tells more than the least time."""
    bits, found = workload.arrays.bits, 0
    for _ in range(6):
        i, r = rng.randrange(1, len(bits)), rng.choice(task.arrays.variants.tolist())
        j, behind = rng.randrange(i), rng.randrange(task.arrays.most_stages)
        if (bits[j] & ~bits[i]).any():
            continue
        key, y = StageKey(i, j, r), in_flight(task.arrays.schedule, task.arrays.microbatches, behind)
        least = least_figures(key, workload.arrays, task.arrays)
        priced_s = priced_time_s(key, y, least, workload.arrays, task.arrays)
        _, start, items = stage_items(key, y, workload.arrays, task.arrays)
        for chosen in product(*(range(a, b) for a, b in pairwise(start))):
            rows = items[list(chosen)]
            if rows[:, 3].sum() <= task.arrays.memory_bytes[r]:
                time_s = rows[:, 0].sum() + rows[:, 1].sum() + least.tensor_forward_s + least.tensor_backward_s
                assert priced_s <= time_s * (1.0 + 1e-9)
        found += priced_s > least.time_s * (1.0 + 1e-9)
    return found


def value_s(result: task_search.TaskResult) -> float | None:
    return None if result.found is None else result.found.value_s


@pytest.mark.parametrize("schedule", FlushSchedule)
def test_tasks_without_the_memory_for_all_layers_have_no_plan(
    schedule: FlushSchedule, monkeypatch: pytest.MonkeyPatch, few: bool
) -> None:
    left_out = kept_with_plan = 0
    for seed in range(40 if few else 100):
        instance = random_instance(seed, most_layers=6)
        instance = instance.replace(memory_bytes=Random(seed).uniform(0.1, 1.0) * instance.memory_bytes)
        workload, _ = tables(instance)
        if workload is None:
            continue
        with monkeypatch.context() as patch:
            patch.setattr("piper_ray.engine.flush.tasks._is_there_memory", lambda *_: True)
            everything = tasks_of(instance, workload, schedule)
        kept = {task.key for task in tasks_of(instance, workload, schedule)}
        for task in everything:
            found = run_task(SearchSpace(workload.arrays), task, np.array([np.inf, 0.0])).found
            assert task.key in kept or found is None
            left_out += task.key not in kept
            kept_with_plan += task.key in kept and found is not None
    assert left_out >= 20
    assert kept_with_plan >= 20


def tables(instance: Instance) -> tuple[FlushWorkload | None, PathArrays | None]:
    variants = tuple(x for x in stage_variants(instance, Restrictions()) if x.degree <= instance.devices)
    if not variants:
        return None, None
    lattice = build_lattice(build_graph(instance, without_contraction()), 10**6)
    workload = build_workload(instance, lattice, variants, BorderRates.of(instance, lattice.graph, PAPERS_SCHEDULE))
    labelling = Labelling.of(workload.lattice.graph)
    return workload, None if labelling is None else build_paths(workload, labelling)
