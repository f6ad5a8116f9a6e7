"""The solver is as good as trying everything, also in its choice among plans of equal time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_ray.engine.solve import solve
from piper_ray.model.constraints import Recompute, Restrictions
from piper_ray.model.instance import Instance
from piper_ray.model.solution import Status
from tests.brute_force import brute_force
from tests.instances import instances, named_instances, random_instance
from tests.lengths import long_after
from tests.solver_support import ONE_THREAD, assert_optimal

NO_RESTRICTION = Restrictions()


def assert_solved_as_by_brute_force(instance: Instance, restrictions: Restrictions = NO_RESTRICTION) -> None:
    solution = solve(instance, restrictions=restrictions, options=ONE_THREAD)
    expected = brute_force(instance, restrictions)
    if expected is None:
        assert solution.status is Status.INFEASIBLE
        return
    assert_optimal(instance, solution)
    assert solution.plan is not None
    assert solution.time_per_sample_s == pytest.approx(float(expected.time_per_sample_s), rel=1e-9, abs=0.0)
    assert solution.plan.devices == expected.plan.devices
    assert len(solution.plan.stages) == len(expected.plan.stages)


@pytest.mark.parametrize("name", named_instances())
def test_named_instances(name: str) -> None:
    assert_solved_as_by_brute_force(named_instances()[name])


@given(instances(most_layers=4))
def test_small_instances(instance: Instance) -> None:
    assert_solved_as_by_brute_force(instance)


@given(instances(most_layers=3, most_devices=8, most_degrees=3))
def test_more_devices_and_degrees(instance: Instance) -> None:
    assert_solved_as_by_brute_force(instance)


@pytest.mark.parametrize("seed", long_after(1, range(2)))
def test_random_instances(seed: int, few: bool) -> None:
    for number in range(15 if few else 30):
        assert_solved_as_by_brute_force(random_instance(1000 * seed + number))


@given(instances(most_layers=3))
def test_one_device(instance: Instance) -> None:
    assert_solved_as_by_brute_force(instance.replace(devices=1))


@given(instances(most_layers=3, most_devices=9), st.sampled_from([1, 2, 5, 7, 9]))
def test_batches_with_few_divisors(instance: Instance, microbatches: int) -> None:
    assert_solved_as_by_brute_force(instance.replace(microbatches=microbatches))


@given(instances(most_layers=3), st.integers(1, 40))
def test_memory_to_the_byte(instance: Instance, memory_bytes: int) -> None:
    assert_solved_as_by_brute_force(instance.replace(memory_bytes=float(memory_bytes)))


RESTRICTIONS = [
    Restrictions(tensor_parallelism=False),
    Restrictions(data_parallelism=False),
    Restrictions(tensor_parallelism=False, data_parallelism=False),
    Restrictions(recompute=Recompute.ALWAYS),
    Restrictions(recompute=Recompute.NEVER),
    Restrictions(recompute=Recompute.ALL_OR_NONE),
    Restrictions(data_parallelism=False, recompute=Recompute.ALL_OR_NONE),
    Restrictions(recompute=Recompute.FIRST_K),
    Restrictions(recompute=Recompute.ONE_FOR_ALL),
]


@pytest.mark.parametrize("restrictions", RESTRICTIONS, ids=repr)
@given(instance=instances(most_layers=3))
def test_restrictions(restrictions: Restrictions, instance: Instance) -> None:
    assert_solved_as_by_brute_force(instance, restrictions)
    assert_plan_obeys(instance, restrictions)


@pytest.mark.parametrize("restrictions", long_after(1, RESTRICTIONS), ids=repr)
def test_restrictions_on_random_instances(restrictions: Restrictions) -> None:
    for seed in range(20):
        instance = random_instance(seed, most_layers=4, most_tmpcs=3)
        assert_solved_as_by_brute_force(instance, restrictions)
        assert_plan_obeys(instance, restrictions)


def assert_plan_obeys(instance: Instance, restrictions: Restrictions) -> None:
    plan = solve(instance, restrictions=restrictions, options=ONE_THREAD).plan
    for stage in plan.stages if plan is not None else ():
        t = stage.tensor_parallel_degree
        assert t == 1 or restrictions.tensor_parallelism
        assert stage.data_parallel_degree == 1 or restrictions.data_parallelism
        roles = set()
        for layer, tmpc_id in stage.tmpc_ids.items():
            offered = {tmpc.id: tmpc.recompute for tmpc in instance.layer_by_id[layer].tmpcs[t]}
            if len(set(offered.values())) > 1:  # the layer has the choice
                roles.add(offered[tmpc_id])
        if restrictions.recompute not in (Recompute.AUTO, Recompute.FIRST_K):
            assert len(roles) <= 1
        assert not (restrictions.recompute is Recompute.ALWAYS and False in roles)
        assert not (restrictions.recompute is Recompute.NEVER and True in roles)


@pytest.mark.parametrize(
    ("devices", "memory_bytes", "free_s", "restricted_s"),
    [
        (2, 26.0, 14.5, [14.5, 14.5, 14.5, 16.5, 16.0, 16.0, 16.0]),
        (3, 32.0, 11.75, [11.75, 12.5, 12.5, 13.75, 12.5, 12.5, 12.5]),
        (4, 16.0, 8.5, [9.0, 8.5, 9.0, 9.0, None, 8.5, 8.5]),
    ],
)
def test_what_restrictions_cost(
    devices: int, memory_bytes: float, free_s: float, restricted_s: list[float | None]
) -> None:
    """On one chain: each restriction makes it slower somewhere, or impossible. Brute force finds the same."""
    instance = named_instances()["equal chain"].replace(devices=devices, memory_bytes=memory_bytes)
    assert solve(instance, options=ONE_THREAD).time_per_sample_s == free_s
    for restrictions, expected_s in zip(RESTRICTIONS[: len(restricted_s)], restricted_s, strict=True):
        assert solve(instance, restrictions=restrictions, options=ONE_THREAD).time_per_sample_s == expected_s
        assert_solved_as_by_brute_force(instance, restrictions)
