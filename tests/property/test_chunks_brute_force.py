"""Under schedules with chunks: no plan simulates below the bound, and what is returned fits and takes what is said."""

from __future__ import annotations

from dataclasses import replace

import pytest

import piper_ray
from piper_ray.model.instance import Instance
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.model.solution import Status
from tests.chunks_brute_force import least_step_s
from tests.instances import random_instance
from tests.solver_support import ONE_THREAD

SCHEDULES = [
    Schedule(ScheduleName.INTERLEAVED, 1),
    Schedule(ScheduleName.INTERLEAVED, 2),
    Schedule(ScheduleName.INTERLEAVED, 2, group=3),
    Schedule(ScheduleName.LOOPED_BFS, 2),
    Schedule(ScheduleName.ZB_H1),
    Schedule(ScheduleName.ZB_H1, 2),
    Schedule(ScheduleName.ZB_V),
    Schedule(ScheduleName.DUALPIPE_V),
]


def small(seed: int) -> Instance:
    """Of few plans; in every third, memory is what some plan needs and no more."""
    instance = random_instance(seed, most_layers=4 + seed % 2, most_tmpcs=2, most_devices=6)
    return replace(instance, name=f"seed {seed}")


def assert_bounded(instance: Instance, schedule: Schedule, restrictions: Restrictions = Restrictions()) -> bool:
    """Whether the best plan was found."""
    least_s = least_step_s(instance, schedule, restrictions)
    found = piper_ray.solve(instance, schedule=schedule, restrictions=restrictions, options=ONE_THREAD)
    what = f"{instance.name} {schedule}"
    if least_s is None:
        assert found.plan is None, what
        return True
    assert found.status is not Status.INFEASIBLE, what
    least_s /= instance.microbatches
    assert found.lower_bound_s <= least_s * (1 + 1e-9), what
    if found.plan is None or found.time_per_sample_s is None:
        return False
    assert found.time_per_sample_s >= least_s * (1 - 1e-9), what
    if found.status is Status.OPTIMAL:
        assert found.lower_bound_s >= found.time_per_sample_s * (1 - 2e-9), what
    simulation = piper_ray.simulate(instance, found.plan, found.schedule)
    assert simulation.time_per_sample_s == pytest.approx(found.time_per_sample_s, rel=1e-9), what
    assert not simulation.memory_violations, what
    assert [*restrictions.violations(instance, found.plan, found.schedule)] == [], what
    return found.time_per_sample_s <= least_s * (1 + 1e-9)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_random_graphs(schedule: Schedule) -> None:
    best = [assert_bounded(small(seed), schedule) for seed in range(30)]
    assert sum(best) >= 0.8 * len(best)
