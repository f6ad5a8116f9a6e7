"""Equal sites, each with pipelines of its own: the best plan is that of all, tried and simulated, at the rates of the
devices put down site by site; the referee, the simulation, certificates and files agree."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

import piper_ray
from piper_ray.model.instance import Instance
from piper_ray.model.schedule import Schedule, ScheduleName
from tests.chunks_brute_force import least_step_s
from tests.flush_brute_force import brute_force, plan_batch_s
from tests.instances import random_instance
from tests.lengths import long_after
from tests.link_rates import with_levels

SITES = ("east", "west", "north")


def at_sites(instance: Instance, rng: Random) -> Instance:
    """The same devices, at each of two or three sites."""
    names = SITES[: rng.choice([2, 2, 3])]
    slow = instance.bandwidth_bytes_per_s * rng.choice([0.1, 0.5, 1.0, 3.0])
    cluster = replace(instance.cluster, devices=instance.devices * len(names), sites=names, between_bytes_per_s=slow)
    return instance.replace(cluster=cluster, microbatches=instance.microbatches * rng.choice([1, len(names)]))


def drawn(seed: int, most_layers: int = 4) -> Instance:
    rng = Random(seed)
    instance = random_instance(seed, most_layers=most_layers)
    return at_sites(with_levels(rng, instance) if rng.random() < 0.7 else instance, rng)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("seeds", long_after(1, [range(start, start + 5) for start in range(0, 30, 5)]), ids=str)
def test_the_best_plan_at_sites(seeds: range, schedule: str) -> None:
    found = 0
    for seed in seeds:
        instance = drawn(seed)
        best = brute_force(instance, schedule)
        solution = piper_ray.solve(instance, schedule=schedule, threads=1)
        certificate = piper_ray.certify(instance, solution, threads=1)
        proved = piper_ray.verify_certificate(instance, certificate, threads=1)
        if best is None:
            assert solution.plan is None, seed
            continue
        assert solution.plan is not None
        value_s = best.batch_s / instance.microbatches
        assert solution.time_per_sample_s == pytest.approx(value_s, rel=1e-9), seed
        assert plan_batch_s(instance, solution.plan, schedule) == pytest.approx(best.batch_s, rel=1e-9)
        valued = piper_ray.evaluate(instance, solution.plan, schedule=schedule)
        assert valued.time_per_sample_s == pytest.approx(value_s, rel=1e-9)
        assert proved.bound_s == pytest.approx(value_s, rel=1e-8)
        assert proved.bound_s <= value_s * (1.0 + 1e-9)
        found += 1
    assert found


CHUNKS = [
    Schedule(ScheduleName.INTERLEAVED, 2),
    Schedule(ScheduleName.ZB_H1, 1),
    Schedule(ScheduleName.ZB_V),
]


@pytest.mark.parametrize("schedule", long_after(1, CHUNKS), ids=str)
@pytest.mark.parametrize("seeds", long_after(1, [range(start, start + 3) for start in range(0, 15, 3)]), ids=str)
def test_with_chunks(seeds: range, schedule: Schedule) -> None:
    for seed in seeds:
        instance = drawn(seed, most_layers=3)
        best = least_step_s(instance, schedule)
        solution = piper_ray.solve(instance, schedule=schedule, threads=1)
        if best is None:
            assert solution.plan is None, seed
            continue
        assert solution.time_per_sample_s is not None
        assert solution.time_per_sample_s * instance.microbatches == pytest.approx(best, rel=0.01), seed
        assert solution.lower_bound_s * instance.microbatches <= best * (1.0 + 1e-9)
