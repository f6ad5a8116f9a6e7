"""What a search is expected to take: what is measured of an evaluation, and what is assumed. Not by the clock."""

from __future__ import annotations

import numpy as np
import pytest

import piper_ray
from piper_ray.engine.evaluation.state_tables import StateTables, evaluate_downsets
from piper_ray.engine.evaluation.threshold import evaluate_threshold
from piper_ray.engine.preview import forecast_solve
from piper_ray.engine.search import expected
from piper_ray.engine.search.expected import expected_between_s, expected_evaluation_s
from scripts.benchmarks.subjects import FAMILIES
from tests.instances import equal_chain, two_towers
from tests.solver_support import tables

TOWERS = two_towers(24, devices=16, microbatches=16, memory_bytes=300.0)


def test_an_evaluation_that_is_quick_is_measured_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = tables(TOWERS).problem
    monkeypatch.setattr(expected, "_rest_s", lambda *_: pytest.fail("there is no rest"))
    assert expected_evaluation_s(problem, 1.3 * problem.lower_bound_s()) > 0.0


def test_the_rest_of_a_long_one_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many downsets some are looked at; those that no plan can use are not."""
    problem = tables(TOWERS).problem
    threshold_s = 1.3 * problem.lower_bound_s()
    looked_at: list[int] = []

    def recorded(first: int, *others: object) -> object:
        looked_at.append(first)
        return evaluate_downsets(first, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(expected, "evaluate_downsets", recorded)
    monkeypatch.setattr(expected, "_BEGINNING_S", 0.0)
    monkeypatch.setattr(expected._Beginning, "next_batch", _stop_at(10))
    assert expected_evaluation_s(problem, threshold_s) > 0.0
    once = looked_at[: len(looked_at) // 2]
    assert looked_at == once + once, "first to fill what is kept, then by the clock"
    assert len(once) == expected._DRAWN
    assert min(looked_at) >= problem.lattice.level_start[10]
    assert len(set(looked_at)) > 20


def _stop_at(level: int) -> object:
    real = expected._Beginning.next_batch

    def next_batch(self: expected._Beginning, states: StateTables) -> object:
        self._until_s = float("inf")
        if states.level >= level:
            self.states = states
            raise expected._Enough
        return real(self, states)

    return next_batch


def test_later_levels_are_like_those_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all were live all are, and within their limits."""
    problem = tables(TOWERS).problem
    beginning = expected._Beginning()
    monkeypatch.setattr(expected._Beginning, "next_batch", _stop_at(10))
    with pytest.raises(expected._Enough):
        evaluate_threshold(problem, beginning, 1.5 * problem.lower_bound_s())
    assert beginning.states is not None
    first = int(problem.lattice.level_start[10])
    likely = expected._likely(problem, beginning.states, first)
    owner = np.repeat(np.arange(likely.counts.size), likely.counts)
    limits = beginning.states.target.device_limit[first:]
    assert ((likely.counts > 0) == (limits >= 1)).all()
    assert (likely.tallies <= limits[owner]).all()
    assert (np.sort(likely.tallies)[-5:] > likely.tallies.mean()).all(), "what has more work needs more devices"


def test_states_of_later_levels_are_fronts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which each has fewer devices for a larger sum."""
    cells = next(subject for subject in FAMILIES if subject.id == "cells-4x5")
    problem, beginning = tables(cells.make()).problem, expected._Beginning()
    monkeypatch.setattr(expected._Beginning, "next_batch", _stop_at(30))
    with pytest.raises(expected._Enough):
        evaluate_threshold(problem, beginning, 1.3 * problem.lower_bound_s())
    assert beginning.states is not None
    likely = expected._likely(problem, beginning.states, int(problem.lattice.level_start[beginning.states.level]))
    owner = np.repeat(np.arange(likely.counts.size), likely.counts)
    side_by_side = owner[1:] == owner[:-1]
    assert side_by_side.sum() > 100
    assert (np.diff(likely.tallies)[side_by_side] < 0).all()
    assert (np.diff(likely.sums)[side_by_side] > 0).all()


def test_later_levels_take_after_several_where_they_are_narrow() -> None:
    """Of a chain each level is one downset: of those before some have states and some do not."""
    problem = tables(equal_chain(40)).problem
    places = expected._places(problem.lattice.level_start, 20)
    assert places.tolist() == [19 - k % 10 for k in range(21)]


def test_a_chain_is_looked_into_with_few_borders_first() -> None:
    """Far above the bound by work where memory is what limits it: there its evaluations are."""
    chain = next(subject for subject in FAMILIES if subject.id == "chain-250").make()
    problem = tables(chain).problem
    lower_s = problem.lower_bound_s()
    upper_s = expected._upper_s(chain, problem, lower_s)
    best_s = piper_ray.solve(chain, threads=1).time_per_sample_s
    assert upper_s is not None
    assert best_s is not None
    assert 1.3 * lower_s < best_s <= upper_s * (1 + 1e-9) < 1.5 * best_s


def test_what_is_wide_takes_as_long_as_its_potentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as all downsets would."""
    monkeypatch.setattr("piper_ray.engine.wide_layers._MANY", 20)
    monkeypatch.setattr("piper_ray.engine.wide_layers._MANY_A_LAYER", 1)
    monkeypatch.setattr("piper_ray.engine.preview.expected_search_s", lambda *_: pytest.fail("of all downsets"))
    found, twice = forecast_solve(TOWERS), expected._WIDE_ROUNDS * 2
    assert found.seconds is not None
    assert found.memory_bytes == forecast_solve(TOWERS, quick=True).memory_bytes
    monkeypatch.setattr(expected, "_WIDE_ROUNDS", twice)
    assert forecast_solve(TOWERS).seconds == pytest.approx(2 * found.seconds)


def test_nothing_is_left_of_a_search_without_work() -> None:
    problem = tables(equal_chain(3)).problem
    assert expected_between_s(problem, 0.0, 0.0) is not None


@pytest.mark.parametrize("instance", [two_towers(24), equal_chain(600)], ids=["towers", "a chain"])
def test_wide_lattices_are_looked_into(instance: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piper_ray.engine.preview.expected_search_s", lambda *_: 1234.0)
    assert forecast_solve(instance).seconds == pytest.approx(1234.0, abs=60)  # type: ignore[arg-type]
    assert forecast_solve(instance, quick=True).seconds < 60  # type: ignore[arg-type, operator]
    assert forecast_solve(two_towers(5)).seconds < 60  # type: ignore[operator]


def test_what_is_not_counted_is_listed_if_it_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piper_ray.engine.preview.expected_search_s", lambda *_: 1234.0)
    counted = forecast_solve(TOWERS)
    monkeypatch.setattr("piper_ray.engine.lattice.counting._MOST_VERTICES", 10)
    assert forecast_solve(TOWERS, quick=True).downsets is None
    listed = forecast_solve(TOWERS)
    assert (listed.downsets, listed.memory_bytes) == (counted.downsets, counted.memory_bytes)
    assert listed.seconds == pytest.approx(1234.0, abs=60)
    monkeypatch.setattr("piper_ray.engine.preview.LISTED", 600)
    assert forecast_solve(TOWERS).downsets is None


def test_chains_of_some_hundred_layers_are_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_into: list[int] = []
    monkeypatch.setattr(
        "piper_ray.engine.preview.expected_search_s", lambda one, _: looked_into.append(len(one.layers))
    )
    for length in (50, 250):
        assert (forecast_solve(equal_chain(length)).seconds or 0.0) < 60
    assert looked_into == [250]
