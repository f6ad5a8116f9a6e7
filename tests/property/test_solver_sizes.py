"""Ends of the range: one device or a hundred thousand, one microbatch or a billion, wide lattices and long chains."""

from __future__ import annotations

import pytest

from piper_ray.engine.solve import solve
from piper_ray.model.instance import Instance, divisors
from piper_ray.model.options import SolveOptions
from piper_ray.model.solution import Status
from tests.brute_force import brute_force
from tests.instances import build, equal_chain, random_instance, tmpc
from tests.lengths import long_after
from tests.solver_support import ONE_THREAD, assert_optimal

MOST_DEVICES = 100_000


def assert_solved_as_by_brute_force(instance: Instance) -> None:
    solution, expected = solve(instance, options=ONE_THREAD), brute_force(instance)
    if expected is None:
        assert solution.status is Status.INFEASIBLE
        return
    assert_optimal(instance, solution)
    assert solution.plan is not None
    assert solution.time_per_sample_s == pytest.approx(float(expected.time_per_sample_s), rel=1e-9, abs=0.0)
    assert solution.plan.devices == expected.plan.devices
    assert len(solution.plan.stages) == len(expected.plan.stages)


@pytest.mark.parametrize("microbatches", long_after(4, [1, 2, 99_991, 2 * 49_999, 30_030, 3**10]))
@pytest.mark.parametrize("seed", long_after(2, range(3)))
def test_a_hundred_thousand_devices(seed: int, microbatches: int) -> None:
    """Prime batches and such with many divisors; brute force tries them all."""
    instance = random_instance(seed, most_layers=2, most_tmpcs=2)
    assert_solved_as_by_brute_force(instance.replace(devices=MOST_DEVICES, microbatches=microbatches))


@pytest.mark.parametrize("microbatches", [10**9, 735_134_400, 999_999_937, 2**29])
def test_a_billion_microbatches(microbatches: int) -> None:
    """One layer of 1 s and no weights runs on the largest divisor that the devices allow."""
    instance = build({0: {1: [tmpc(1)]}}, {}, devices=MOST_DEVICES, microbatches=microbatches)
    solution = solve(instance, options=ONE_THREAD)
    assert_optimal(instance, solution)
    most = max(d for d in divisors(microbatches) if d <= MOST_DEVICES)
    assert solution.time_per_sample_s == 1 / most
    assert solution.plan is not None
    assert solution.plan.devices == most


@pytest.mark.parametrize("microbatches", [735_134_400, 720_720])
def test_many_divisors_use_nearly_all_devices(microbatches: int) -> None:
    instance = equal_chain(8, devices=MOST_DEVICES, microbatches=microbatches, bandwidth_bytes_per_s=1e9)
    solution = solve(instance, options=ONE_THREAD)
    assert_optimal(instance, solution)
    # 48 s of work, and next to nothing to send; the divisors leave a few devices over.
    assert solution.time_per_sample_s is not None
    assert 48 / MOST_DEVICES <= solution.time_per_sample_s <= 1.05 * 48 / MOST_DEVICES


@pytest.mark.parametrize("seed", long_after(4, range(10)))
def test_one_microbatch_allows_one_stage(seed: int) -> None:
    instance = random_instance(seed, most_layers=5).replace(microbatches=1, devices=30, memory_bytes=1e6)
    assert_solved_as_by_brute_force(instance)
    plan = solve(instance, options=ONE_THREAD).plan
    assert plan is None or len(plan.stages) == plan.data_parallel_sum == 1


@pytest.mark.parametrize("microbatches", long_after(2, [2, 3, 5, 7, 11, 13]))
def test_a_prime_number_of_microbatches(microbatches: int) -> None:
    for seed in range(12):
        assert_solved_as_by_brute_force(random_instance(seed, most_layers=4).replace(microbatches=microbatches))


def independent_chains(chains: int, length: int, devices: int) -> Instance:
    """Layers of 1 s that send nothing and may not be replicated: N is a prime above K."""
    count = chains * length
    edges = {(v, v + 1): 0.0 for v in range(count - 1) if (v + 1) % length}
    return build({v: {1: [tmpc(1)]} for v in range(count)}, edges, devices=devices, microbatches=100_003)


@pytest.mark.parametrize(("chains", "length", "devices"), [(2, 20, 7), (5, 5, 4), (7, 3, 5), (4, 8, 32), (13, 1, 4)])
def test_independent_chains(chains: int, length: int, devices: int) -> None:
    """The best is an even split: ceil(layers / devices) seconds, and any order along the chains attains it."""
    instance = independent_chains(chains, length, devices)
    solution = solve(instance, options=SolveOptions(threads=2))
    assert_optimal(instance, solution)
    assert solution.stats.downsets == (length + 1) ** chains
    slowest = -(-chains * length // devices)
    assert solution.time_per_sample_s == float(slowest)
    assert solution.plan is not None
    assert solution.plan.devices == -(-chains * length // slowest)


def test_a_chain_of_a_thousand_layers() -> None:
    instance = equal_chain(1000, devices=100, microbatches=100_003, bandwidth_bytes_per_s=1e9)
    solution = solve(instance, options=ONE_THREAD)
    assert_optimal(instance, solution)
    assert solution.stats.downsets == 1001
    # Ten layers of 6 s on each device; a stage's neighbours cost 2 * 2 * 1 / 1e9 s.
    assert solution.time_per_sample_s == pytest.approx(60.0, rel=1e-6)
