"""Dual prices never ask for more devices than a plan has, and limits by them keep all that leads to one."""

from __future__ import annotations

from contextlib import closing
from fractions import Fraction

import pytest

import piper_ray
from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.evaluation.completion import Completion
from piper_ray.engine.evaluation.dual_prices import DualPrices, StageCover
from piper_ray.engine.evaluation.outcome import Outcome
from piper_ray.engine.evaluation.threshold import evaluate_threshold
from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.search import pricing
from piper_ray.engine.tables.problem import Problem
from piper_ray.model.instance import Instance
from piper_ray.model.solution import Solution
from tests.brute_force import brute_force
from tests.instances import equal_chain, parallel_branches, random_instance, two_towers
from tests.lengths import long_after
from tests.solver_support import ONE_THREAD, assert_optimal, tables

FACTORS = (Fraction(9, 10), Fraction(99, 100), Fraction(1), Fraction(101, 100), Fraction(3, 2))


def dual_prices_of(problem: Problem, threshold_s: float, rounds: int = 40) -> DualPrices:
    cover = StageCover.of(problem)
    assert cover is not None
    return cover.dual_prices(threshold_s, rounds=rounds)


@pytest.mark.parametrize("bucket", long_after(1, range(2)))
def test_no_plan_takes_fewer_devices(bucket: int) -> None:
    """By exact rationals: the optimum is at most K devices at its own time, and none below it; states say the rest."""
    seen, above_work = 0, 0
    for seed in range(25 * bucket, 25 * (bucket + 1)):
        instance = random_instance(seed, most_layers=4, most_devices=10, most_tmpcs=3)
        best = brute_force(instance)
        if best is None or best.time_per_sample_s == 0:
            continue
        seen += 1
        problem = tables(instance, contraction=without_contraction()).problem
        optimum = best.time_per_sample_s
        found = dual_prices_of(problem, float(optimum))
        assert found.devices <= best.plan.devices
        above_work += found.devices > problem.workload.sums.device_work_s[-1] / float(optimum) * 1.001
        for factor in FACTORS:
            threshold_s = float(optimum * factor)
            bounds = dual_prices_of(problem, threshold_s, rounds=1), dual_prices_of(problem, threshold_s)
            plain, *narrowed = (
                evaluated(problem, threshold_s, None if x is None else Completion.by_dual_prices(x, problem))
                for x in (None, *bounds)
            )
            for outcome in narrowed:
                assert (outcome.feasible, outcome.devices) == (plain.feasible, plain.devices)
                assert outcome.stages == plain.stages
                assert outcome.live_downsets <= plain.live_downsets
            for bound in bounds:
                if plain.feasible:
                    assert bound.devices <= plain.devices
    assert seen >= 15
    assert above_work >= 10


def evaluated(problem: Problem, threshold_s: float, completion: Completion | None) -> Outcome:
    with closing(LocalBackend(1)) as backend:
        return evaluate_threshold(problem, backend, threshold_s, completion=completion)


def solved(instance: Instance, always: bool, monkeypatch: pytest.MonkeyPatch) -> Solution:
    """With dual prices for each threshold, or with none."""
    with monkeypatch.context() as patch:
        patch.setattr(pricing, "_SPENT", -1.0 if always else 1e300)
        patch.setattr(pricing, "_LARGE", 1e300)
        patch.setattr(pricing, "_WORTHWHILE", -1e300)
        patch.setattr(pricing, "_LIVE_SHARE", 1e9)
        return piper_ray.solve(instance, options=ONE_THREAD)


@pytest.mark.parametrize("seed", long_after(5, range(20)))
def test_a_search_with_them_finds_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    instance = random_instance(seed, most_layers=6, most_devices=9)
    priced, plain = (solved(instance, always, monkeypatch) for always in (True, False))
    assert priced.status is plain.status
    if priced.plan is None or plain.plan is None:
        assert priced.plan is plain.plan is None
        return
    assert priced.plan.devices == plain.plan.devices
    assert priced.time_per_sample_s == pytest.approx(plain.time_per_sample_s, rel=1e-9)
    assert_optimal(instance, priced)


@pytest.mark.long
@pytest.mark.parametrize(
    "instance",
    [
        two_towers(12, devices=9, microbatches=12, memory_bytes=400.0),
        parallel_branches(3, 5, devices=10, microbatches=8, memory_bytes=200.0),
        equal_chain(40, devices=16, microbatches=16, memory_bytes=300.0),
    ],
    ids=["towers", "branches", "chain"],
)
def test_families_are_evaluated_with_less(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    priced, plain = (solved(instance, always, monkeypatch) for always in (True, False))
    assert priced.plan == plain.plan
    assert priced.time_per_sample_s == plain.time_per_sample_s
    assert plain.time_per_sample_s is not None
    problem, below_s = tables(instance).problem, 0.99 * plain.time_per_sample_s
    completion = Completion.by_dual_prices(dual_prices_of(problem, below_s), problem)
    with_less = evaluated(problem, below_s, completion)
    assert 0 < with_less.live_downsets < evaluated(problem, below_s, None).live_downsets
