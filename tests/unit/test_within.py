"""Searches for plans that keep within a time: over once there is none, and the same answer where there is one."""

from __future__ import annotations

import pytest

from piper_ray.engine.solve import solve
from piper_ray.model.errors import UsageError
from piper_ray.model.options import SolveOptions
from piper_ray.model.schedule import StepTerms
from piper_ray.model.solution import Status
from piper_ray.model.stop import StoppedBy
from tests.instances import build, tmpc
from tests.lengths import long_after

INSTANCE = build(
    {v: {1: [tmpc(3 + v % 4)], 2: [tmpc(2 + v % 3)]} for v in range(9)},
    {(v, v + 1): 1 for v in range(8)},
    devices=6,
    microbatches=6,
)


@pytest.mark.parametrize("schedule", ["2bw", "1f1b", "gpipe", "interleaved"])
def test_a_search_ends_once_no_plan_is_fast_enough(schedule: str) -> None:
    best = solve(INSTANCE, schedule=schedule)
    assert best.time_per_sample_s is not None
    within_s = 0.5 * best.lower_bound_s
    found = solve(INSTANCE, schedule=schedule, options=SolveOptions(within_s=within_s))
    assert found.stopped_by is StoppedBy.TOO_SLOW
    assert found.status in (Status.UNKNOWN, Status.FEASIBLE)
    assert within_s < found.lower_bound_s <= best.time_per_sample_s * (1.0 + 1e-9)


@pytest.mark.parametrize("schedule", long_after(2, ["2bw", "1f1b", "gpipe", "interleaved"]))
def test_what_is_fast_enough_is_found(schedule: str) -> None:
    step = StepTerms(optimizer_s=0.0 if schedule == "2bw" else 100.0)
    best = solve(INSTANCE, schedule=schedule, step=step)
    assert best.time_per_sample_s is not None
    for slower in (1.0, 1.7):
        options = SolveOptions(within_s=slower * best.time_per_sample_s)
        found = solve(INSTANCE, schedule=schedule, options=options, step=step)
        assert found.plan == best.plan
        assert found.time_per_sample_s == best.time_per_sample_s
        assert (found.status, found.stopped_by) == (best.status, best.stopped_by)


def test_the_optimizer_is_part_of_the_time() -> None:
    """Which is longer than a batch: half of both is too little."""
    step = StepTerms(optimizer_s=1000.0)
    best = solve(INSTANCE, schedule="1f1b", step=step)
    assert best.time_per_sample_s is not None
    options = SolveOptions(within_s=0.5 * best.time_per_sample_s)
    assert solve(INSTANCE, schedule="1f1b", options=options, step=step).stopped_by is StoppedBy.TOO_SLOW


def test_a_time_is_not_negative() -> None:
    with pytest.raises(UsageError, match="within_s must be a number of seconds"):
        SolveOptions(within_s=-1.0)
