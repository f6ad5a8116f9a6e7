"""Small instances with their optimum under schedules with a flush, found elsewhere by simulating every plan."""

from __future__ import annotations

import pytest

from piper_ray.model.solution import Status
from piper_ray.workloads.formats.load import instance_of
from tests.data import Record, goldens
from tests.flush_brute_force import plan_batch_s
from tests.flush_schedules import FlushSchedule
from tests.flush_support import solve_flush
from tests.lengths import long_after

RECORDS = goldens("schedules")


@pytest.mark.parametrize("schedule", long_after(2, FlushSchedule.flushed()))
@pytest.mark.parametrize("tens", long_after(1, range(0, len(RECORDS), 10)))
def test_the_optimum_is_met(tens: int, schedule: FlushSchedule) -> None:
    for record in RECORDS[tens : tens + 10]:
        _check(record, schedule)


def _check(record: Record, schedule: FlushSchedule) -> None:
    instance = instance_of(record["instance"])
    wanted_s = record["value_s"][schedule.value]
    solution = solve_flush(instance, schedule)
    if wanted_s is None:
        assert solution.status is Status.INFEASIBLE, record["seed"]
        return
    assert solution.status is Status.OPTIMAL, record["seed"]
    assert solution.time_per_sample_s == pytest.approx(wanted_s, rel=1e-9), record["seed"]
    assert solution.lower_bound_s <= wanted_s * (1 + 1e-9)
    assert solution.plan is not None
    batch_s = plan_batch_s(instance, solution.plan, schedule.value)
    assert batch_s / instance.microbatches == pytest.approx(wanted_s, rel=1e-9), record["seed"]
