"""The simulation against processes that sleep for work and hand on over gloo, under every schedule.

The passes' own durations are taken from the run, as the simulation is of the order of things: on a loaded machine
sleeps last longer, in the run and in the simulation. What remains is the time that a message was under way or its
receiver slow to wake: bounded by what the run itself measured of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from piper_ray.model.schedule import ASYNCHRONOUS, CHUNKED, Schedule, ScheduleName
from piper_ray.simulate.actions import Actions, flush_lists, one_f_one_b
from piper_ray.simulate.kernels.events import Floats, simulate_events
from piper_ray.simulate.stages import Hop
from piper_ray.simulate.steady import rule_in_flight
from piper_ray.simulate.timeline import PassSeconds, program_of
from tests.run_support import results_of_ranks
from tests.simulate_gloo import END, NEXT, START, WAITED
from tests.simulate_support import placed, stage_passes
from tests.simulate_twin import B, F, I, Pass, W

RANKS, MICROBATCHES = 3, 6
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Measured:
    """times_s: for each rank float64[passes, 4]: start, end, when the rank turned to the next pass, and how long it had
    waited for a message that was sent."""

    lists: list[list[Pass]]
    times_s: list[Floats]

    @property
    def step_s(self) -> float:
        first_s = min(float(times[0, START]) for times in self.times_s)
        return max(float(times[-1, END]) for times in self.times_s) - first_s


def _schedule(name: ScheduleName) -> Schedule:
    return Schedule(name, 2 if name in CHUNKED and name is not ScheduleName.ZB_H1 else 1)


def _lists(schedule: Schedule) -> list[Actions]:
    if schedule.name in ASYNCHRONOUS:
        return [one_f_one_b(MICROBATCHES, y) for y in rule_in_flight([1] * RANKS)]
    return flush_lists(schedule, RANKS, MICROBATCHES)


def _sleeps_s(stages: int) -> list[list[float]]:
    """Unequal stages, F, B, I, W of each: some tens of ms for a microbatch on a rank."""
    work = [0.7 + 0.6 * (stage * 5 % 7) / 7 for stage in range(stages)]
    each_s = 0.02 * RANKS / stages
    return [[each_s * x, 2.1 * each_s * x, 1.1 * each_s * x, each_s * x] for x in work]


def _measured(folder: Path) -> dict[ScheduleName, Measured]:
    """One real run under every schedule."""
    runs: list[dict[str, Any]] = []
    for name in ScheduleName:
        schedule = _schedule(name)
        lists = [stage_passes(schedule, RANKS, rank, actions) for rank, actions in enumerate(_lists(schedule))]
        stages = RANKS * schedule.v
        places = list(placed(schedule, [1] * stages).places)
        runs.append({"lists": lists, "rank_of_stage": places, "sleep_s": _sleeps_s(stages)})
    found = results_of_ranks("simulate_gloo", folder, RANKS, {"runs": runs}, strict=False)
    return {
        name: Measured(run["lists"], [np.array(of_rank[number]) for of_rank in found])
        for number, (name, run) in enumerate(zip(ScheduleName, runs, strict=True))
    }


def _simulated_s(name: ScheduleName, run: Measured, durations_s: list[Floats]) -> float:
    """The step with these durations of each rank's passes, transfers taking no time."""
    schedule = _schedule(name)
    stages = RANKS * schedule.v
    where = placed(schedule, [1] * stages)
    none = np.zeros((stages, 4))
    hops = [Hop(stage, stage + 1, 0.0, 0.0) for stage in range(stages - 1)]
    program = program_of(where, _lists(schedule), MICROBATCHES, PassSeconds(none, none), hops, 0.0)
    assert [list(actions) for actions in zip(program.kind, program.stage, program.microbatch, strict=True)] == [
        list(one) for passes in run.lists for one in passes
    ]
    timed = program._replace(duration_s=np.concatenate(durations_s))
    return float(simulate_events(timed).end_s.max())


@pytest.mark.long
def test_real_processes_take_as_long_and_start_nothing_early(tmp_path: Path) -> None:
    for name, run in _measured(tmp_path).items():
        worked_s = [times[:, END] - times[:, START] for times in run.times_s]
        slow_to_wake_s = [times[:, NEXT] - times[:, START] + times[:, WAITED] for times in run.times_s]
        assert _simulated_s(name, run, worked_s) <= run.step_s * 1.001, name
        assert run.step_s <= 1.1 * _simulated_s(name, run, slow_to_wake_s), name
        _assert_in_order(run)


def _assert_in_order(run: Measured) -> None:
    """No process started a pass before what the simulation lets it wait for had ended."""
    ended_s = {
        tuple(one): time[END]
        for passes, times in zip(run.lists, run.times_s, strict=True)
        for one, time in zip(passes, times, strict=True)
    }
    for passes, times in zip(run.lists, run.times_s, strict=True):
        for (kind, stage, k), time in zip(passes, times, strict=True):
            backward = [(B, stage + 1, k), (I, stage + 1, k), (F, stage, k)]
            before = {F: [(F, stage - 1, k)], B: backward, I: backward, W: [(I, stage, k)]}[kind]
            assert all(ended_s[one] <= time[START] for one in before if one in ended_s)
