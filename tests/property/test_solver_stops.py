"""A solve that ends early: by its gap, the clock or an interrupt. What it returns is valid and its bound holds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from unittest.mock import patch

import pytest

from piper_ray.engine.solve import solve
from piper_ray.model.events import EvaluationAdvanced, EvaluationFinished, Event, IncumbentFound
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.solution import Solution, Status
from piper_ray.workloads.formats.load import load
from tests.data import WORKLOADS
from tests.instances import equal_chain, parallel_branches, random_instance, two_towers
from tests.lengths import long_after
from tests.solver_support import ONE_THREAD, assert_plan_is_worth_its_value
from tests.support import GIB


def resnet() -> Instance:
    return load(WORKLOADS["resnet"], devices=32, memory_bytes=2 * GIB, bandwidth_bytes_per_s=25 * GIB)


INSTANCES = {
    "towers": two_towers(6, devices=7, microbatches=12, memory_bytes=60.0),
    "branches": parallel_branches(2, 4, devices=9, microbatches=8, memory_bytes=80.0),
    "chain": equal_chain(12, devices=16, microbatches=16, memory_bytes=40.0),
    "ResNet-50": resnet(),
}


def optimum_of(instance: Instance) -> float:
    optimum = solve(instance, options=ONE_THREAD).time_per_sample_s
    assert optimum is not None
    return optimum


def assert_valid(instance: Instance, solution: Solution, optimum: float) -> None:
    assert solution.lower_bound_s <= optimum * (1 + 1e-9)
    if solution.plan is None:
        assert solution.status is Status.UNKNOWN
        assert solution.time_per_sample_s is None
        assert solution.gap is None
    else:
        assert solution.status in {Status.OPTIMAL, Status.FEASIBLE}
        assert_plan_is_worth_its_value(instance, solution)
        assert solution.time_per_sample_s is not None
        assert solution.time_per_sample_s >= optimum * (1 - 1e-9)
        if solution.status is Status.OPTIMAL:
            assert solution.time_per_sample_s <= optimum * (1 + 1e-9)


@pytest.mark.parametrize("gap", [0.1, 1e-6])
@pytest.mark.parametrize("name", INSTANCES)
def test_gap(name: str, gap: float) -> None:
    instance = INSTANCES[name]
    solution = solve(instance, options=SolveOptions(gap=gap, threads=1))
    assert_valid(instance, solution, optimum_of(instance))
    assert solution.gap is not None
    assert solution.gap <= gap
    if solution.status is Status.OPTIMAL:
        assert solution.stopped_by is None
    else:
        assert solution.stopped_by == "gap"


@pytest.mark.parametrize("seed", long_after(5, range(20)))
def test_gap_on_random_instances(seed: int) -> None:
    instance = random_instance(seed, most_layers=7)
    exact = solve(instance, options=ONE_THREAD)
    solution = solve(instance, options=SolveOptions(gap=0.25, threads=1))
    assert (solution.status is Status.INFEASIBLE) == (exact.status is Status.INFEASIBLE)
    if exact.time_per_sample_s is not None:
        assert_valid(instance, solution, exact.time_per_sample_s)
        assert solution.gap is not None
        assert solution.gap <= 0.25


@pytest.mark.parametrize("name", INSTANCES)
def test_no_time_at_all(name: str) -> None:
    instance = INSTANCES[name]
    solution = solve(instance, options=SolveOptions(time_limit_s=1e-9, threads=1))
    assert solution.status in {Status.FEASIBLE, Status.UNKNOWN}
    assert solution.stopped_by == "time limit"
    assert_valid(instance, solution, optimum_of(instance))
    assert solution.lower_bound_s > 0.0


def test_no_time_for_an_instance_without_a_plan() -> None:
    instance = INSTANCES["ResNet-50"].replace(devices=16, memory_bytes=1.5 * GIB)
    assert solve(instance, options=ONE_THREAD).status is Status.INFEASIBLE
    solution = solve(instance, options=SolveOptions(time_limit_s=1e-9, threads=1))
    assert (solution.status, solution.stopped_by) == (Status.UNKNOWN, "time limit")
    assert (solution.plan, solution.time_per_sample_s, solution.gap) == (None, None, None)
    assert 0.0 < solution.lower_bound_s < float("inf")


def test_a_long_time_limit_changes_nothing() -> None:
    instance = INSTANCES["towers"]
    solution = solve(instance, options=SolveOptions(time_limit_s=1e6, threads=1))
    assert solution.status is Status.OPTIMAL
    assert solution.time_per_sample_s == optimum_of(instance)


@pytest.fixture(autouse=True, scope="module")
def _same_events_in_each_run() -> Iterator[None]:
    """However long they take: nothing is learned of the rate of work."""
    with patch("piper_ray.engine.tables.problem.Rate.record", lambda *_: None):
        yield


class Interrupter:
    """Keeps the events of the search and interrupts at one of them, as Ctrl-C would.

    Before the search there is nothing to return: an interrupt there goes to the caller.
    """

    def __init__(self, at: int | None) -> None:
        self.events: list[Event] = []
        self._at = at

    def __call__(self, event: Event) -> None:
        if isinstance(event, (EvaluationAdvanced, EvaluationFinished, IncumbentFound)):
            self.events.append(event)
            if len(self.events) == self._at:
                raise KeyboardInterrupt


def events_of(instance: Instance) -> list[Event]:
    listener = Interrupter(at=None)
    solve(instance, options=ONE_THREAD, listener=listener)
    return listener.events


@pytest.mark.parametrize("name", long_after(2, INSTANCES))
def test_interrupt_at_any_event(name: str) -> None:
    instance = INSTANCES[name]
    optimum, count = optimum_of(instance), len(events_of(instance))
    assert count > 10
    statuses = set()
    for at in range(1, count + 1, max(1, count // 25)):
        interrupter = Interrupter(at)
        solution = solve(instance, options=ONE_THREAD, listener=interrupter)
        assert len(interrupter.events) == at, "no event after the interrupt"
        assert solution.stopped_by == "interrupt"
        assert_valid(instance, solution, optimum)
        statuses.add(solution.status)
    assert Status.FEASIBLE in statuses


@pytest.mark.parametrize("name", INSTANCES)
def test_an_interrupt_keeps_the_incumbent_and_its_bound(name: str) -> None:
    instance = INSTANCES[name]
    events = events_of(instance)
    last = max(number for number, event in enumerate(events, start=1) if isinstance(event, IncumbentFound))
    solution = solve(instance, options=ONE_THREAD, listener=Interrupter(last))
    incumbent = events[last - 1]
    assert isinstance(incumbent, IncumbentFound)
    assert solution.time_per_sample_s == incumbent.time_per_sample_s == incumbent.bounds.upper_s
    assert solution.lower_bound_s == incumbent.bounds.lower_s
    assert solution.plan is not None
    assert (len(solution.plan.stages), solution.plan.devices) == (incumbent.stages, incumbent.devices)


@pytest.mark.parametrize("name", INSTANCES)
def test_reported_bounds_close_in_on_the_optimum(name: str) -> None:
    instance = INSTANCES[name]
    optimum = optimum_of(instance)
    bounds = [e.bounds for e in events_of(instance) if isinstance(e, (EvaluationFinished, IncumbentFound))]
    for bound in bounds:
        assert bound.lower_s <= optimum * (1 + 1e-9)
        assert bound.upper_s is None or bound.upper_s >= optimum * (1 - 1e-9)
    for earlier, later in pairwise(bounds):
        assert later.lower_s >= earlier.lower_s
        assert earlier.upper_s is None or (later.upper_s is not None and later.upper_s <= earlier.upper_s)
