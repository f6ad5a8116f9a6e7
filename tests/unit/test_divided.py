"""What divides what: when all devices of a cluster can be used, and which batch lets them be."""

from __future__ import annotations

from random import Random

import pytest

from piper_ray.engine.solve import solve
from piper_ray.model.constraints import (
    AllDevices,
    Restrictions,
    SameDegrees,
    StageCount,
    can_use_all,
    divisible_batch,
    odd_part,
    reason_against_all,
)
from piper_ray.model.schedule import ScheduleName
from tests.instances import random_instance


@pytest.mark.parametrize(
    ("batch", "devices", "expected"),
    [
        (1024, 56, 1008),
        (1024, 24, 1008),
        (1024, 64, 1024),
        (1024, 16384, 1024),
        (1000, 64, 992),
        (1000, 50, 1000),
        (256, 40, 260),
        (3, 7, 7),
        (1, 1, 1),
    ],
)
def test_a_batch_that_more_degrees_divide(batch: int, devices: int, expected: int) -> None:
    found = divisible_batch(batch, devices)
    assert found == expected
    assert found % odd_part(devices) == 0


def test_all_devices_can_be_used_where_some_plan_does() -> None:
    """With as much memory as one likes, whatever layers, microbatches and degrees there are."""
    rng, both = Random(5), set()
    for seed in range(60):
        instance = random_instance(seed, most_layers=4)
        instance = instance.replace(
            devices=rng.choice([3, 5, 6, 7, 12]), microbatches=rng.choice([1, 2, 4, 6, 9]), memory_bytes=1e18
        )
        constraints = (AllDevices(), SameDegrees(), *((StageCount(rng.randint(1, 3)),) if rng.random() < 0.5 else ()))
        restrictions = Restrictions(constraints=constraints)
        can = can_use_all(instance, restrictions)
        found = solve(instance, schedule=ScheduleName.ONE_F_ONE_B, restrictions=restrictions)
        if found.plan is not None:
            assert can
        if not can:
            assert found.infeasibility is not None
            assert found.infeasibility.reason == reason_against_all(instance, restrictions)
        both.add(can)
    assert both == {True, False}
