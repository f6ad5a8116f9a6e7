"""The solver against recorded values: exact optima of random instances, and the published implementation's values."""

from __future__ import annotations

from itertools import islice

import pytest

from piper_ray.engine.solve import solve
from piper_ray.evaluate import evaluate
from piper_ray.model.instance import Instance
from piper_ray.model.solution import Status
from piper_ray.planners.published.paper_table import paper_table
from tests.lengths import long_after
from tests.solver_support import ONE_THREAD, assert_optimal
from tests.support import PublishedGolden, assert_same_time, published_goldens, random_goldens

PUBLISHED = sorted(published_goldens(), key=lambda golden: golden.cpu_s)
# The paper's table with exact TMPC choice takes a second or two on these.
WITH_QUICK_TABLE = [
    golden
    for golden in PUBLISHED
    if golden.time_per_sample_s is not None
    and golden.devices <= {"bert32a100": 64, "resnet": 8, "gnmt": 0}[golden.workload]
]


@pytest.mark.parametrize("part", long_after(1, range(2)))
def test_random_records(part: int) -> None:
    infeasible = 0
    for golden in islice(random_goldens(), part, None, 5):
        solution = solve(golden.instance, options=ONE_THREAD)
        if golden.time_per_sample_s is None:
            infeasible += 1
            assert solution.time_per_sample_s is None
            assert solution.status is Status.INFEASIBLE, golden.number
            assert solution.plan is None
            assert solution.infeasibility is not None
            assert solution.infeasibility.reason, golden.number
        else:
            assert solution.time_per_sample_s == pytest.approx(golden.time_per_sample_s, rel=1e-9), golden.number
            assert_optimal(golden.instance, solution)
    assert infeasible == (6, 9)[part]


@pytest.mark.long
def test_least_memory_of_infeasible_random_records() -> None:
    given = 0
    for golden in random_goldens():
        if golden.time_per_sample_s is not None:
            continue
        infeasibility = solve(golden.instance, options=ONE_THREAD).infeasibility
        assert infeasibility is not None
        if infeasibility.least_memory_bytes is None:
            assert not is_feasible(golden.instance, 1e15), golden.number
        else:
            given += 1
            assert infeasibility.least_memory_bytes > golden.instance.memory_bytes
            assert is_feasible(golden.instance, infeasibility.least_memory_bytes), golden.number
            assert not is_feasible(golden.instance, infeasibility.least_memory_bytes * (1 - 1e-6)), golden.number
    assert given > 20


def is_feasible(instance: Instance, memory_bytes: float) -> bool:
    return solve(instance.replace(memory_bytes=memory_bytes), options=ONE_THREAD).status is Status.OPTIMAL


@pytest.mark.parametrize("golden", long_after(8, PUBLISHED), ids=lambda golden: golden.name)
def test_published_records(golden: PublishedGolden) -> None:
    solution = solve(golden.instance, options=ONE_THREAD)
    if golden.time_per_sample_s is None:
        assert solution.status is Status.INFEASIBLE
        assert solution.infeasibility is not None
        assert solution.infeasibility.least_memory_bytes is not None
        assert solution.infeasibility.least_memory_bytes > golden.instance.memory_bytes
    else:
        assert_optimal(golden.instance, solution)
        assert solution.time_per_sample_s is not None
        assert solution.time_per_sample_s <= golden.time_per_sample_s * (1 + 1e-9)


@pytest.mark.parametrize("golden", long_after(2, WITH_QUICK_TABLE), ids=lambda golden: golden.name)
def test_published_records_against_the_exact_table(golden: PublishedGolden) -> None:
    """Which is at or below the published value, and whose plan is worth what it says."""
    exact = paper_table(golden.instance)
    assert exact.time_per_sample_s is not None
    assert golden.time_per_sample_s is not None
    assert exact.time_per_sample_s <= golden.time_per_sample_s * (1 + 1e-9)
    assert exact.plan is not None
    assert_same_time(evaluate(golden.instance, exact.plan).time_per_sample_s, exact.time_per_sample_s, golden.name)
    solution = solve(golden.instance, options=ONE_THREAD)
    assert solution.time_per_sample_s == pytest.approx(exact.time_per_sample_s, rel=1e-9)


def test_what_the_exact_table_covers() -> None:
    assert {golden.workload for golden in WITH_QUICK_TABLE} == {"bert32a100", "resnet"}
    assert len(WITH_QUICK_TABLE) >= 9


@pytest.mark.parametrize(
    ("name", "exact", "greedy"),
    [
        ("resnet K=32 M=2GiB", 24.03139852170149, 24.62589852172137),
        ("resnet K=32 M=8GiB", 15.757072921163505, 15.758026065495278),
        ("resnet K=64 M=1.5GiB", 16.9838828125, 16.992140624999998),
    ],
)
def test_exact_choice_beats_the_greedy_one(name: str, exact: float, greedy: float) -> None:
    """``exact`` is what the paper's table with exact choice makes of it, in some ten seconds each."""
    golden = next(golden for golden in PUBLISHED if golden.name == name)
    assert golden.time_per_sample_s == greedy
    assert solve(golden.instance, options=ONE_THREAD).time_per_sample_s == pytest.approx(exact, rel=1e-9)
