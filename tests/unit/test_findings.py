"""What solves of one graph tell of each other: bounds and plans that hold, and answers that stay the same."""

from __future__ import annotations

from random import Random

import pytest

from piper_ray import Restrictions, solve
from piper_ray.engine.preparation import Findings, FindingsPoint, PointShape, Preparation, prepare
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.solution import Solution
from tests.instances import random_instance
from tests.lengths import long_after

ANY = Restrictions()


def points(instance: Instance, rng: Random) -> list[Instance]:
    """Of one graph, in any order."""
    found = [
        instance.replace(devices=devices, microbatches=count, memory_bytes=memory, bandwidth_bytes_per_s=bandwidth)
        for devices in (2, 3, 6)
        for count in (4, 12)
        for memory in (0.5 * instance.memory_bytes, instance.memory_bytes)
        for bandwidth in (1.0, 2.0)
    ]
    rng.shuffle(found)
    return found


def answer(solution: Solution) -> tuple[object, ...]:
    """All that a solve says of its instance."""
    return solution.status, solution.time_per_sample_s, solution.lower_bound_s, solution.plan, solution.infeasibility


@pytest.mark.parametrize("seed", long_after(2, range(3)))
def test_answers_do_not_depend_on_what_was_solved_before(seed: int) -> None:
    rng = Random(seed)
    instance = random_instance(seed)
    shared: dict[PointShape, Preparation] = {}
    alone, with_others = 0, 0
    for point in points(instance, rng):
        made = prepare(point, ANY)
        first = shared.setdefault(made.shape, made)
        single, among = solve(point), solve(point, prepared=first)
        assert answer(among) == answer(single)
        alone += len(single.stats.evaluations)
        with_others += len(among.stats.evaluations)
    assert with_others < alone


def small(devices: int = 4, microbatches: int = 8, memory_bytes: float = 10.0, bandwidth: float = 2.0) -> Instance:
    instance = random_instance(1)
    return instance.replace(
        devices=devices, microbatches=microbatches, memory_bytes=memory_bytes, bandwidth_bytes_per_s=bandwidth
    )


@pytest.mark.parametrize(
    ("other", "bounds", "is_plan"),
    [
        ({}, True, True),
        ({"devices": 5}, False, True),
        ({"devices": 3}, True, False),
        ({"microbatches": 16}, False, True),
        ({"microbatches": 4}, True, False),
        ({"microbatches": 12}, False, False),
        ({"memory_bytes": 11.0}, False, True),
        ({"memory_bytes": 9.0}, True, False),
        ({"bandwidth": 3.0}, False, True),
        ({"bandwidth": 1.0}, True, False),
        ({"devices": 5, "memory_bytes": 9.0}, False, False),
    ],
)
def test_bounds_hold_for_less_and_plans_for_more(other: dict[str, float], bounds: bool, is_plan: bool) -> None:
    findings = Findings()
    plan = Plan((Stage((0,), 1, 4, {0: "x"}),))
    findings.record(FindingsPoint.of(small(), ANY), 2.0, 3.0, plan)
    known = findings.about(FindingsPoint.of(small(**other), ANY))  # type: ignore[arg-type]
    assert (known.lower_s > 1.999) == bounds
    assert (plan in known.plans) == (is_plan or (bounds and plan.devices <= int(other.get("devices", 4))))
    assert findings.about(FindingsPoint.of(small(), Restrictions(tensor_parallelism=False))) == (0.0, ())
