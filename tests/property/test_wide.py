"""Graphs whose downsets are made as states reach them have the answers of those whose downsets are all listed."""

from __future__ import annotations

import pytest

import piper_ray
from piper_ray.engine import preparation
from piper_ray.engine.search import wide
from piper_ray.model.errors import LimitError
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.solution import Solution, Status
from piper_ray.model.stop import StoppedBy
from tests.brute_force import brute_force
from tests.instances import equal_chain, parallel_branches, random_instance, two_towers
from tests.solver_support import ONE_THREAD, assert_optimal, assert_plan_is_worth_its_value


def solved_wide(instance: Instance, monkeypatch: pytest.MonkeyPatch, **options: float) -> Solution:
    """As if its downsets were too many to list."""

    def refused(*_: object, **__: object) -> None:
        raise LimitError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(preparation, "lattice_within", refused)
        return piper_ray.solve(instance, options=SolveOptions(threads=1, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("bucket", range(4))
def test_brute_force(bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = 0
    for seed in range(15 * bucket, 15 * (bucket + 1)):
        instance = random_instance(seed, most_layers=4, most_devices=8, most_tmpcs=3)
        best = brute_force(instance)
        found = solved_wide(instance, monkeypatch)
        if best is None:
            assert found.status is Status.INFEASIBLE
            continue
        seen += 1
        assert found.status is Status.OPTIMAL
        assert_plan_is_worth_its_value(instance, found)
        assert found.time_per_sample_s == pytest.approx(float(best.time_per_sample_s), rel=2e-9)
        assert found.lower_bound_s <= float(best.time_per_sample_s) * (1 + 1e-12)
    assert seen >= 8


@pytest.mark.parametrize(
    "instance",
    [
        two_towers(9, devices=8, memory_bytes=60.0),
        two_towers(12, devices=16),
        parallel_branches(3, 4, devices=6),
        equal_chain(12, devices=5, memory_bytes=40.0),
        *(random_instance(seed, most_layers=9, most_devices=12) for seed in range(200, 216)),
    ],
    ids=lambda instance: instance.name,
)
def test_the_plan_is_that_of_the_whole_lattice(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = piper_ray.solve(instance, options=ONE_THREAD)
    if whole.status is Status.INFEASIBLE:
        assert solved_wide(instance, monkeypatch).status is Status.INFEASIBLE
        return
    found = solved_wide(instance, monkeypatch)
    assert_optimal(instance, found)
    if found.stats.evaluations:  # else its bound alone proves it
        assert found.plan == whole.plan
    assert found.time_per_sample_s == pytest.approx(whole.time_per_sample_s, rel=2e-9)


def test_too_many_of_these_leave_a_plan_and_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = two_towers(12, devices=7, memory_bytes=50.0)
    whole = piper_ray.solve(instance, options=ONE_THREAD)
    monkeypatch.setattr(wide, "_MOST_STEPS", 1)
    monkeypatch.setattr(wide, "_FEW_STEPS", 1)
    found = solved_wide(instance, monkeypatch)
    assert (found.status, found.stopped_by) == (Status.FEASIBLE, StoppedBy.TOO_MANY_DOWNSETS)
    assert_plan_is_worth_its_value(instance, found)
    assert whole.time_per_sample_s is not None
    assert found.lower_bound_s <= whole.time_per_sample_s <= found.time_per_sample_s  # type: ignore[operator]


def test_a_gap_that_is_enough_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = solved_wide(two_towers(12, devices=7, memory_bytes=50.0), monkeypatch, gap=0.9)
    assert (found.status, found.stopped_by) == (Status.FEASIBLE, StoppedBy.GAP)
