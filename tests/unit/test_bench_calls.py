"""What workers would make of a search's calls, on a clock that goes by one at each look."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

import piper_ray
from piper_ray.engine.backends.calls import Call
from piper_ray.model.options import SolveOptions
from scripts.ray_benchmarks.calls import CALL_S, ClockedBackend, ClockedWorkers
from tests.flush_instances import uneven_layers
from tests.solver_support import ONE_THREAD


def test_calls_of_several_workers_go_side_by_side() -> None:
    now = [0.0]

    def work(control: np.ndarray) -> float:
        now[0] += 3.0
        return float(control[0])

    times_s = []
    for workers in (1, 2, 4):
        clocked = ClockedWorkers(workers, lambda: now[0])
        for number in range(4):
            clocked.give(Call(number, work, (), (), "a call", bound_s=float(number)))
        found = [one for _ in range(4) for one in clocked.done(1.0)]
        assert [(one.call.key, one.result) for one in found] == [(number, float(number)) for number in range(4)]
        assert (clocked.work_s, clocked.driver_s, clocked.longest_s) == (12.0, 0.0, 3.0)
        times_s.append(clocked.now_s)
    assert times_s == pytest.approx([12.0, 6.0 + CALL_S, 3.0 + CALL_S])


@pytest.mark.parametrize("schedule", ["interleaved", "1f1b"])
def test_the_search_answers_as_on_threads(schedule: str) -> None:
    instance, ticks = uneven_layers(3), count()
    backend = ClockedBackend(4, lambda: float(next(ticks)))
    found = piper_ray.solve(instance, schedule=schedule, backend=backend, options=SolveOptions())
    alone = piper_ray.solve(instance, schedule=schedule, options=ONE_THREAD)
    assert (found.plan, found.lower_bound_s) == (alone.plan, alone.lower_bound_s)
    did = backend.opened
    assert did.now_s >= max(did.longest_s, did.work_s / 4 - did.lost_s)
    backend.close()
