"""Prices of each second and byte at each position of a pipeline: no plan takes less than they say, nor is one lost."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from piper_ray.engine.flush.path_prices import LayerChoices, PathPrices, bounded, path_bounds
from piper_ray.engine.flush.paths import longest_paths
from piper_ray.engine.flush.position_program import path_prices
from piper_ray.engine.flush.space import SearchSpace
from piper_ray.engine.flush.task_search import run_task
from piper_ray.engine.kernels.flush_paths import simulate_step
from piper_ray.engine.kernels.flush_types import GPIPE, ONE_F_ONE_B, FlushTables, FlushTask
from piper_ray.model.instance import Instance
from tests.flush_schedules import FlushSchedule
from tests.instances import two_towers
from tests.lengths import long_after
from tests.unit.test_flush_limits import listed_when_wanted, of_space, searched, tables, value_s
from tests.unit.test_kernels_flush import random_pipelines, tasks_of


@pytest.mark.parametrize("schedule", [GPIPE, ONE_F_ONE_B])
def test_no_path_is_longer_than_the_batch_and_one_is_as_long(schedule: int, few: bool) -> None:
    """The one to the end of the first stage is, where no other stage synchronises."""
    rng, empty = Random(11), 2
    for m, stages in random_pipelines(9, 200 if few else 500):
        forward_s, backward_s = (np.append(np.zeros(empty), stages[:, column]) for column in range(2))
        sync_s = np.array([rng.choice([0.0, rng.uniform(0.0, 9.0)]) for _ in forward_s])
        none_s = np.zeros_like(sync_s)
        batch_s = simulate_step(schedule, m, forward_s, backward_s, sync_s)
        alone_s = simulate_step(schedule, m, forward_s, backward_s, none_s)
        paths = longest_paths(schedule, m, forward_s[::-1], backward_s[::-1], sync_s[::-1])
        lengths = [path.seconds(forward_s[::-1], backward_s[::-1], sync_s[::-1]) for path in paths]
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] <= batch_s * (1.0 + 1e-12)
        without = max(path.seconds(forward_s[::-1], backward_s[::-1], none_s) for path in paths)
        assert without == pytest.approx(alone_s, rel=1e-12)
        other_s = np.array([rng.uniform(0.0, 9.0) for _ in forward_s])
        other_batch_s = simulate_step(schedule, m, other_s, backward_s, sync_s)
        for path in paths:  # of any other stages too
            assert path.seconds(other_s[::-1], backward_s[::-1], sync_s[::-1]) <= other_batch_s * (1.0 + 1e-12)


@pytest.mark.long
@pytest.mark.parametrize("schedule", long_after(1, FlushSchedule.flushed()))
def test_no_plan_of_a_task_takes_less_than_its_prices_say(schedule: FlushSchedule) -> None:
    closer = compared = 0
    for seed, workload, _, task, batch_s in searched(schedule):
        prices = path_prices(workload.arrays, task.arrays)
        if prices is None:
            continue
        assert prices.bound_s <= batch_s * (1.0 + 1e-9), seed
        assert path_bounds(workload.arrays, task.arrays, prices).ahead_s[0, 0] == pytest.approx(prices.bound_s)
        soon = path_prices(workload.arrays, task.arrays, 0.99 * prices.bound_s)
        assert soon is not None
        assert 0.99 * prices.bound_s <= soon.bound_s <= batch_s * (1.0 + 1e-9), seed
        compared += 1
        closer += prices.bound_s > task.lower_s * (1.0 + 1e-6)
    assert compared > 25
    assert closer > compared / 4


@pytest.mark.long
@pytest.mark.parametrize("schedule", long_after(1, FlushSchedule.flushed()))
def test_with_any_prices_a_task_has_the_same_plan(schedule: FlushSchedule) -> None:
    """Good ones, and others that only lie on paths."""
    rng, compared = Random(5), 0
    for seed, workload, paths, task, batch_s in searched(schedule):
        good = path_prices(workload.arrays, task.arrays)
        if good is None:
            continue
        for prices in (good, any_prices(rng, workload.arrays, task.arrays, good)):
            assert prices.bound_s <= batch_s * (1.0 + 1e-9)
            for share in (0.97, 1.001, 1.2):
                plain = run_task(SearchSpace(workload.arrays), task, np.array([batch_s * share, 0.0]))
                for space in (SearchSpace(workload.arrays, True, paths), listed_when_wanted(workload, paths)):
                    priced = run_task(
                        space, of_space(space, replace(task, prices=prices)), np.array([batch_s * share, 0.0])
                    )
                    assert (priced.found is None) is (plain.found is None), (seed, task.degrees, share)
                    assert value_s(priced) == (plain.found and pytest.approx(plain.found.value_s, rel=1e-9)), seed
                compared += 1
    assert compared > 75


@pytest.mark.parametrize("schedule", long_after(1, FlushSchedule.flushed()))
def test_what_the_known_plan_proves_of_a_task_is_no_more_than_its_best_plan_takes(
    schedule: FlushSchedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounds at the known plan's time come where a task has many states: here that is any."""
    monkeypatch.setattr("piper_ray.engine.flush.task_search._FEW_STATES", 0)
    compared, ruled_out = 0, 0
    for seed, workload, paths, task, batch_s in searched(schedule):
        for known_s in (0.95 * batch_s, 1.2 * batch_s) if batch_s > 0.0 else ():
            space, control = SearchSpace(workload.arrays, True, paths), np.array([0.9 * batch_s, 0.0])
            found = run_task(space, task, control, known_s=known_s)
            assert found.found is None, (seed, task.degrees)
            assert found.proved_s <= batch_s * (1.0 + 1e-9), (seed, task.degrees)
            compared += 1
            ruled_out += found.proved_s > 0.9 * batch_s * (1.0 + 1e-9)
    assert compared > 12
    assert ruled_out > 0


def test_a_layer_without_a_choice_has_no_price() -> None:
    """No stage of that degree has it."""
    towers = two_towers(3, devices=4)
    layers = [replace(towers.layers[0], tmpcs={1: towers.layers[0].tmpcs[1]}), *towers.layers[1:]]
    workload, _ = tables(Instance(layers, towers.edges, cluster=towers.cluster, batch=towers.batch))
    assert workload is not None
    tasks = tasks_of(towers, workload, FlushSchedule.ONE_F_ONE_B)
    found = {task.degrees[1]: path_prices(workload.arrays, task.arrays) for task in tasks}
    assert found[1] is not None
    assert found[2] is None


def any_prices(rng: Random, tables: FlushTables, task: FlushTask, good: PathPrices) -> PathPrices:
    """A mean of the paths of stages of any seconds, and any price of memory."""
    positions = task.most_stages
    forward_s, backward_s, sync_s = (np.array([rng.uniform(0.0, 2.0) for _ in range(positions)]) for _ in range(3))
    paths = longest_paths(task.schedule, task.microbatches, forward_s, backward_s, sync_s)[:3]
    forward, backward, sync = (np.mean(often, axis=0) for often in zip(*paths, strict=True))
    memory_s = (good.memory_s + good.memory_s.max()) * np.array([rng.uniform(0.0, 1.0) for _ in range(positions)])
    return bounded(LayerChoices.of(tables, task), task, PathPrices(forward, backward, sync, memory_s, 0.0))
