"""Figures too far apart for sums of floats end a search with what to do about them, rather than never."""

from __future__ import annotations

import pytest

import piper_ray
from piper_ray.engine.ledger import Inexact
from piper_ray.engine.search.bracket import Bracket
from piper_ray.model.errors import LimitError
from piper_ray.model.events import Event, Note
from piper_ray.model.instance import Instance
from piper_ray.model.solution import Status
from piper_ray.model.stop import StoppedBy
from tests.instances import build, tmpc
from tests.solver_support import ONE_THREAD


def with_one_of(large_s: float) -> Instance:
    """A chain whose last layer takes so long on one device, as if to say that it is not to run on one."""
    rows = {v: {1: [tmpc(1 + 0.37 * v)], 2: [tmpc(0.8 + 0.21 * v)]} for v in range(4)}
    rows[3][1] = [tmpc(large_s)]
    return build(rows, {(v, v + 1): 0.5 for v in range(3)}, memory_bytes=1000)


@pytest.mark.parametrize("large_s", [1e12, 1e17, 1e24])
def test_a_search_ends_with_what_it_has_and_with_what_to_do(large_s: float) -> None:
    told: list[Event] = []
    instance = with_one_of(large_s)

    def listener(event: Event) -> None:
        told.append(event)

    found = piper_ray.solve(instance, options=ONE_THREAD, schedule="2bw", listener=listener)
    assert (found.status, found.stopped_by) == (Status.FEASIBLE, StoppedBy.INEXACT)
    assert found.plan is not None
    assert found.time_per_sample_s == pytest.approx(piper_ray.evaluate(instance, found.plan).time_per_sample_s)
    assert 0.0 < found.lower_bound_s <= 2.18  # the optimum, which that layer's figure has no part in
    (note,) = (event.text for event in told if isinstance(event, Note) and "not exact" in event.text)
    assert "Leave out configurations that no plan can use" in note


def test_so_does_one_among_the_downsets_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piper_ray.engine.preparation._MANY", 1)
    monkeypatch.setattr("piper_ray.engine.preparation._MANY_A_LAYER", 0)
    found = piper_ray.solve(with_one_of(1e24), options=ONE_THREAD, schedule="2bw")
    assert (found.status, found.stopped_by) == (Status.FEASIBLE, StoppedBy.INEXACT)
    assert 0.0 < found.lower_bound_s <= 2.18


def test_without_any_plan_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise Inexact("a stage that is to fit does not")

    monkeypatch.setattr("piper_ray.engine.search.planning._choices", fails)
    with pytest.raises(LimitError, match=r"not exact enough: .* Leave out configurations that no plan can use"):
        piper_ray.solve(with_one_of(1e17), options=ONE_THREAD, schedule="2bw")


def test_a_frontier_has_no_plan_that_is_none() -> None:
    instance = with_one_of(1e17)
    found = piper_ray.frontier(instance, options=ONE_THREAD, schedule="2bw")
    assert found.stopped_by is StoppedBy.INEXACT
    last, plan = found.points()[-1], found.plan(4)
    assert last.status is Status.FEASIBLE
    assert plan is not None
    assert last.time_per_sample_s == piper_ray.evaluate(instance, plan).time_per_sample_s
    assert 0.0 < last.lower_bound_s <= 2.18


@pytest.mark.parametrize("large_s", [1e3, 1e6])
def test_what_is_not_so_far_apart_is_solved(large_s: float) -> None:
    found = piper_ray.solve(with_one_of(large_s), options=ONE_THREAD, schedule="2bw")
    assert found.time_per_sample_s == pytest.approx(2.18, rel=1e-9)


def test_a_plan_takes_no_longer_than_its_threshold() -> None:
    bracket = Bracket(1.0, 10.0)
    bracket.record_feasible(2.0, 2.0 * (1 + 1e-9))
    with pytest.raises(LimitError, match=r"are to take 1\.5 s take 1\.6 s"):
        bracket.record_feasible(1.5, 1.6)
