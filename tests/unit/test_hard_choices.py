"""TMPC choices that no bound cuts: extra time in proportion to the memory saved, and all layers different."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from piper_ray.engine.kernels.knapsack import TOO_HARD, least_cost
from piper_ray.engine.kernels.types import Items
from piper_ray.engine.solve import solve
from piper_ray.evaluate import evaluate
from piper_ray.model.instance import Instance
from piper_ray.model.solution import Status
from tests.instances import build, tmpc
from tests.solver_support import ONE_THREAD


def _subset_sum(count: int) -> Instance:
    """One device; each layer is fast with m bytes, or m s slower with none; memory for half of all bytes."""
    rng = Random(count)
    sizes = [rng.random() + 0.2 for _ in range(count)]
    layers = {
        v: {1: [tmpc(1, 0, 0, size, name="fast"), tmpc(1 + size, 0, 0, 0, name="small")]}
        for v, size in enumerate(sizes)
    }
    return build(
        layers,
        {(v, v + 1): 0.05 for v in range(count - 1)},
        devices=1,
        microbatches=1013,
        memory_bytes=sum(sizes) / 2,
        bandwidth_bytes_per_s=10.0,
    )


def test_a_small_one_is_solved() -> None:
    assert solve(_subset_sum(14), options=ONE_THREAD).status is Status.OPTIMAL


def test_a_large_one_ends_with_a_plan_and_its_gap() -> None:
    instance = _subset_sum(40)
    solution = solve(instance, options=ONE_THREAD)
    assert (solution.status, solution.stopped_by) == (Status.FEASIBLE, "TMPC choice too hard")
    assert solution.plan is not None
    assert evaluate(instance, solution.plan).time_per_sample_s == solution.time_per_sample_s
    assert solution.gap is not None
    assert 0.0 < solution.gap < 0.15  # from the last threshold that was not too hard


def test_least_cost_says_when_it_gives_up_and_still_finds_one_within_a_budget() -> None:
    rng = Random(1)
    sizes = np.array([rng.random() + 0.2 for _ in range(40)])
    start = np.arange(0, 81, 2)
    cost, memory = np.zeros(80), np.zeros(80)
    cost[1::2], memory[0::2] = sizes, sizes
    limit = float(sizes.sum() / 2)
    choice = np.zeros(40, np.int64)
    items = Items(start, cost, memory)
    assert least_cost(items, limit, np.inf, False, choice) == TOO_HARD
    budget = (float(sizes.sum()) - limit) * 1.0001
    found = least_cost(items, limit, budget, True, choice)
    assert found == pytest.approx(cost[choice].sum(), rel=1e-12)
    assert found <= budget
    assert memory[choice].sum() <= limit


@pytest.mark.parametrize("scale", [1e-110, 1e-160, 5e-324])
def test_times_too_small_to_tell_apart_are_as_good_as_none(scale: float) -> None:
    layers = {v: {1: [tmpc(scale * (v + 1), 0, 1, 0)]} for v in range(5)}
    instance = build(layers, {(v, v + 1): 0 for v in range(4)}, devices=3, microbatches=2, memory_bytes=5.0)
    assert solve(instance, options=ONE_THREAD).status is Status.OPTIMAL
