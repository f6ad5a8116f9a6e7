"""The threshold form finds what the paper's own table finds, on instances too large for brute force."""

from __future__ import annotations

from random import Random

import pytest

from piper_ray.engine.solve import solve
from piper_ray.evaluate import evaluate
from piper_ray.model.constraints import Recompute, Restrictions
from piper_ray.model.instance import Instance
from piper_ray.model.solution import Status
from piper_ray.planners.published.paper_table import paper_table
from tests.instances import equal_chain, parallel_branches, random_instance, two_towers
from tests.lengths import long_after
from tests.solver_support import ONE_THREAD, assert_optimal

NO_RESTRICTION = Restrictions()


def assert_solved_as_by_the_table(instance: Instance, restrictions: Restrictions = NO_RESTRICTION) -> None:
    solution = solve(instance, restrictions=restrictions, options=ONE_THREAD)
    expected = paper_table(instance, restrictions=restrictions)
    if expected.plan is None:
        assert solution.status is Status.INFEASIBLE
        return
    assert_optimal(instance, solution)
    assert solution.plan is not None
    table_s = evaluate(instance, expected.plan).time_per_sample_s
    assert solution.time_per_sample_s == pytest.approx(table_s, rel=1e-9, abs=0.0)
    assert solution.plan.devices <= expected.plan.devices or table_s != solution.time_per_sample_s


@pytest.mark.parametrize("seed", long_after(1, range(2)))
def test_random_instances(seed: int) -> None:
    """Up to ten layers, four TMPCs each, 24 devices and 48 microbatches, under any restriction."""
    rng = Random(seed)
    for number in range(8):
        instance = random_instance(100 * seed + number, most_layers=10, most_devices=24)
        restrictions = Restrictions(
            rng.random() < 0.8,
            rng.random() < 0.8,
            rng.choice([Recompute.AUTO, Recompute.ALWAYS, Recompute.NEVER, Recompute.ALL_OR_NONE]),
        )
        batch = rng.choice([4, 6, 8, 12, 24, 36, 48])
        assert_solved_as_by_the_table(instance.replace(microbatches=batch), restrictions)


@pytest.mark.parametrize("memory_bytes", [14.0, 20.0, 30.0, 55.0, 200.0])
@pytest.mark.parametrize(
    "instance",
    [
        equal_chain(20, devices=24, microbatches=24),
        two_towers(4, devices=16, microbatches=18),
        parallel_branches(2, 4, devices=14, microbatches=12),
    ],
    ids=lambda instance: instance.name,
)
def test_shapes(instance: Instance, memory_bytes: float) -> None:
    assert_solved_as_by_the_table(instance.replace(memory_bytes=memory_bytes))
