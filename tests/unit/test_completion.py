"""Limits from both sides cost no answer, and a search looks at less with them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

import pytest

import piper_ray
from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.evaluation import completion
from piper_ray.engine.evaluation.completion import Completion
from piper_ray.engine.evaluation.state_tables import StateTables
from piper_ray.engine.evaluation.threshold import evaluate_threshold
from piper_ray.model.instance import Instance
from piper_ray.model.solution import Solution
from tests.instances import equal_chain, parallel_branches, two_towers
from tests.solver_support import ONE_THREAD, tables

Found = TypeVar("Found")

INSTANCES = {
    "towers": two_towers(24, devices=9, microbatches=12, memory_bytes=200.0),
    "branches": parallel_branches(3, 5, devices=10, microbatches=8, memory_bytes=60.0),
    "chain": equal_chain(40, devices=16, microbatches=16, memory_bytes=90.0),
}


@dataclass(frozen=True)
class Solved:
    solution: Solution

    @property
    def live(self) -> int:
        return sum(evaluation.live_downsets for evaluation in self.solution.stats.evaluations)


def solved(instance: Instance, many_live: int, monkeypatch: pytest.MonkeyPatch) -> Solved:
    monkeypatch.setattr("piper_ray.engine.search.search._FEW", 0)  # as on lattices too large for a test
    monkeypatch.setattr("piper_ray.engine.search.search._MANY_LIVE", many_live)
    return Solved(piper_ray.solve(instance, options=ONE_THREAD))


@pytest.mark.parametrize("name", INSTANCES)
def test_the_same_answer_from_less(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bounded, plain = (solved(INSTANCES[name], many, monkeypatch) for many in (0, 10**9))
    assert bounded.solution.plan == plain.solution.plan
    assert bounded.solution.time_per_sample_s == plain.solution.time_per_sample_s
    assert bounded.solution.lower_bound_s == plain.solution.lower_bound_s
    assert bounded.live < plain.live


def with_states(factor: float, look: Callable[[StateTables, float], Found]) -> Found:
    """What ``look`` finds in the states of two towers at a threshold, so many times their optimum."""
    instance = INSTANCES["towers"]
    best_s = piper_ray.solve(instance, options=ONE_THREAD).time_per_sample_s
    assert best_s is not None
    found: list[Found] = []
    with closing(LocalBackend(1)) as backend:
        evaluate_threshold(
            tables(instance).problem,
            backend,
            factor * best_s,
            on_finished=lambda states: found.append(look(states, factor * best_s)),
        )
    return found[0]


def completed(states: StateTables, threshold_s: float) -> Completion:
    return Completion.of(threshold_s, states, tables(INSTANCES["towers"]).problem.scratch, lambda: None)


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_a_long_pass_goes_on_where_downsets_lose_states(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the most that it may take; where few do, it ends, and smaller downsets keep the limits that they had."""
    monkeypatch.setattr(completion, "_AT_ONCE", 8)
    whole = with_states(1.01, completed).device_limit
    before = with_states(1.01, lambda states, _: states.target.device_limit.copy())
    assert (whole < before).any()
    monkeypatch.setattr(completion, "_SHARE", -1.0)
    monkeypatch.setattr(completion, "_share_shortened", lambda *_: share)
    found = with_states(1.01, completed).device_limit
    assert (found == (whole if share >= completion._SHORTENED else before)).all()
    monkeypatch.setattr(completion, "_LARGEST_SHARE", -1.0)
    assert (with_states(1.01, completed).device_limit == before).all()


@pytest.mark.parametrize(("factor", "first"), [(1.3, 0), (1.3, 300)])
def test_shortened_are_those_that_lose_states(factor: float, first: int) -> None:
    def compared(states: StateTables, threshold_s: float) -> tuple[float, list[bool]]:
        limits = completed(states, threshold_s).device_limit
        fronts = states.fronts
        lost = [
            any(fronts.tally[state] > limits[i] for state in range(start, start + count))
            for i, (start, count) in enumerate(zip(fronts.start, fronts.states, strict=True))
            if i >= first and count > 0
        ]
        return completion._share_shortened(states, limits, first), lost

    share, lost = with_states(factor, compared)
    assert share == pytest.approx(sum(lost) / len(lost))
    assert any(lost)
    assert all(lost) == (first > 0)
