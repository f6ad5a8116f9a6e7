"""Limits from both sides cost no answer, and a search looks at less with them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import piper_ray
from piper_ray.model.instance import Instance
from piper_ray.model.solution import Solution
from tests.instances import equal_chain, parallel_branches, two_towers
from tests.solver_support import ONE_THREAD

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
