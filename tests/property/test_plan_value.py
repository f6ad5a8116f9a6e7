"""What the solver says a plan takes and holds, against the referee, which shares no code with it."""

from __future__ import annotations

from random import Random

import pytest

import piper_ray
from piper_ray.cost.plan import cost_of
from piper_ray.model.errors import InvalidPlan
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan
from tests.instances import random_instance
from tests.lengths import long_after
from tests.link_rates import with_levels


def random_plans(instance: Instance, rng: Random) -> list[Plan]:
    """Those of some solves on other devices, in part too large or too full for the instance's own."""
    found = []
    for factor in (1.0, 1.5, 4.0):
        devices = rng.randint(1, 2 * instance.devices)
        other = instance.replace(devices=devices, memory_bytes=factor * instance.memory_bytes)
        plan = piper_ray.solve(other, schedule="2bw", threads=1).plan
        found += [] if plan is None else [plan]
    return found


@pytest.mark.parametrize("seeds", long_after(1, [range(40), range(40, 100)]), ids=str)
def test_values_are_the_referees_to_the_bit(seeds: range) -> None:
    valid = wrong = 0
    for seed in seeds:
        instance = random_instance(seed)
        if seed % 2:
            instance = with_levels(Random(seed), instance)
        for plan in random_plans(instance, Random(seed)):
            try:
                expected_s = piper_ray.evaluate(instance, plan, schedule="2bw").time_per_sample_s
            except InvalidPlan:
                wrong += 1
                assert cost_of(instance, plan).fault is not None, seed
                continue
            valid += 1
            assert cost_of(instance, plan) == (expected_s, None), seed
    assert valid >= len(seeds) // 2
    assert wrong >= len(seeds) // 4
