"""Frontiers under schedules with chunks: each point is what a solve gives."""

from __future__ import annotations

import pytest

import piper_ray
from piper_ray.model.constraints import AllDevices, Restrictions, StageCount
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.model.solution import Status
from piper_ray.model.stop import Stop, StoppedBy
from tests.instances import build, equal_chain, random_instance, tmpc
from tests.lengths import long_after
from tests.solver_support import ONE_THREAD

DEVICES = (1, 2, 3, 4, 6)
RULES = {
    "free": Restrictions(),
    "all devices": Restrictions(constraints=[AllDevices()]),
    "two ranks": Restrictions(constraints=[StageCount(2)]),
}


def small(seed: int) -> Instance:
    return random_instance(seed, most_layers=4, most_tmpcs=2).replace(microbatches=4)


@pytest.mark.parametrize(
    ("schedule", "rule"),
    long_after(
        1,
        [
            ("interleaved", "free"),
            (Schedule(ScheduleName.ZB_H1), "all devices"),
            ("zb-v", "two ranks"),
            ("interleaved", "all devices"),
            ("interleaved", "two ranks"),
            (Schedule(ScheduleName.ZB_H1), "free"),
            (Schedule(ScheduleName.ZB_H1), "two ranks"),
            ("zb-v", "free"),
            ("zb-v", "all devices"),
        ],
    ),
    ids=str,
)
def test_every_point_is_what_solve_gives(schedule: Schedule | str, rule: str) -> None:
    rules, steps = RULES[rule], 0
    for seed in range(8):
        instance = small(seed)
        found = piper_ray.frontier(instance, devices=DEVICES, schedule=schedule, restrictions=rules, options=ONE_THREAD)
        for point in found.points():
            on = instance.replace(devices=point.devices)
            alone = piper_ray.solve(on, schedule=schedule, restrictions=rules, options=ONE_THREAD)
            assert point.status is alone.status, (seed, point)
            steps += point.is_step
            solution = found.solution(point.devices)
            if solution.plan is None:
                continue
            assert point.time_per_sample_s == pytest.approx(alone.time_per_sample_s, rel=1e-9), (seed, point)
            assert [*rules.violations(on, solution.plan, solution.schedule)] == []
            simulation = piper_ray.simulate(on, solution.plan, solution.schedule)
            assert simulation.time_per_sample_s == pytest.approx(point.time_per_sample_s, rel=1e-9)
    assert steps >= 1


def test_where_a_layer_can_run_nowhere_the_reason_is_said() -> None:
    instance = build({0: {2: [tmpc(1)]}, 1: {2: [tmpc(1)]}}, {(0, 1): 1}, devices=1)
    found = piper_ray.frontier(instance, schedule="interleaved", options=ONE_THREAD)
    assert [point.status for point in found.points()] == [Status.INFEASIBLE]
    assert found.reason is not None
    assert "tensor-parallel degree 2" in found.reason


def test_it_ends_early_with_what_it_has() -> None:
    instance = equal_chain(12, devices=6, microbatches=12, memory_bytes=200.0)
    late = piper_ray.frontier(instance, schedule="interleaved", options=SolveOptions(threads=1, time_limit_s=1e-9))
    assert late.stopped_by is StoppedBy.TIME_LIMIT
    assert {point.status for point in late.points()} == {Status.UNKNOWN}
    stop: Stop[piper_ray.Frontier] = Stop()
    stop.request()
    none = piper_ray.frontier(instance, schedule="zb-h1", options=ONE_THREAD, stop=stop)
    assert none.stopped_by is StoppedBy.INTERRUPT
    loose = piper_ray.frontier(instance, schedule="zb-h1", options=SolveOptions(threads=1, gap=0.5))
    assert all(point.gap is not None and point.gap <= 0.5 for point in loose.points())
    values = [point.time_per_sample_s for point in loose.points() if point.time_per_sample_s is not None]
    assert values == sorted(values, reverse=True)
