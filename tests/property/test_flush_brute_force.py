"""Under schedules with a flush: the value is that of all plans simulated, and no plan takes less than the bound."""

from __future__ import annotations

import pytest
from hypothesis import given

import piper_ray
from piper_ray.model.constraints import Recompute, Restrictions
from piper_ray.model.instance import Instance, Tmpc
from piper_ray.model.schedule import AllReduce, StepTerms
from piper_ray.model.solution import Status
from tests.flush_brute_force import Role, brute_force, plan_batch_s
from tests.flush_instances import uneven_layers
from tests.flush_schedules import FlushSchedule
from tests.flush_support import solve_flush
from tests.instances import build, instances, named_instances, random_instance
from tests.lengths import long_after

SCHEDULES = FlushSchedule.flushed()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", named_instances())
def test_named_instances(name: str, schedule: FlushSchedule) -> None:
    assert_best(named_instances()[name], schedule)


@pytest.mark.parametrize("schedule", long_after(1, SCHEDULES))
@pytest.mark.parametrize("seeds", long_after(1, [range(start, start + 25) for start in range(0, 100, 25)]), ids=str)
def test_random_graphs(seeds: range, schedule: FlushSchedule) -> None:
    for seed in seeds:
        assert_best(random_instance(seed), schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seeds", long_after(1, [range(10), range(10, 40)]), ids=str)
def test_long_pipelines(seeds: range, schedule: FlushSchedule, few: bool) -> None:
    """Many stages of uneven layers: where the first figures of a tail are not exact."""
    for seed in seeds[:4] if few else seeds:
        assert_best(uneven_layers(seed), schedule)


@given(instances(most_layers=4, most_tmpcs=3))
def test_any_small_instance(instance: Instance) -> None:
    for schedule in SCHEDULES:
        assert_best(instance, schedule)


@pytest.mark.long
@pytest.mark.parametrize("schedule", long_after(1, SCHEDULES))
def test_restricted_recomputation(schedule: FlushSchedule) -> None:
    roles: dict[Recompute, tuple[Role, ...]] = {
        Recompute.ALWAYS: (True,),
        Recompute.NEVER: (False,),
        Recompute.ALL_OR_NONE: (False, True),
        Recompute.FIRST_K: ("first-k",),
    }
    for seed in range(7):
        instance = random_instance(seed, most_layers=4)
        for recompute, allowed in roles.items():
            assert_best(instance, schedule, restrictions=Restrictions(recompute=recompute), roles=allowed)


@pytest.mark.parametrize("schedule", long_after(1, SCHEDULES))
def test_another_all_reduce(schedule: FlushSchedule) -> None:
    for seed in range(30):
        assert_best(random_instance(seed, most_layers=4), schedule, step=StepTerms(AllReduce.RING))


@pytest.mark.parametrize("schedule", long_after(1, SCHEDULES))
def test_terms_of_a_step(schedule: FlushSchedule, few: bool) -> None:
    """A ring of which a quarter hides, and an optimizer: brute force, the search and the simulation agree."""
    terms = StepTerms(AllReduce.RING, 0.25, 0.5)
    feasible = 0
    for seed in range(26 if few else 30):
        instance = random_instance(seed, most_layers=4)
        wanted = brute_force(instance, schedule.value, AllReduce.RING.factor * 0.75)
        solution = piper_ray.solve(instance, schedule=schedule.value, step=terms)
        if wanted is None or solution.plan is None:
            assert wanted is None
            assert solution.plan is None
            continue
        feasible += 1
        expected = pytest.approx((wanted.batch_s + 0.5) / instance.microbatches, rel=1e-9)
        assert solution.time_per_sample_s == expected
        assert solution.lower_bound_s == expected
        found = piper_ray.evaluate(instance, solution.plan, schedule=schedule.value, step=terms)
        assert found.time_per_sample_s == expected
    assert feasible >= 15


def test_a_layer_without_cost_is_worth_a_stage() -> None:
    """With one more microbatch in flight the first stage waits less: so no layer may be merged with its neighbour."""
    tmpcs = {v: {1: [Tmpc("x", time_s, 0, 0, 0)]} for v, time_s in enumerate([3.0, 2.7, 0.0])}
    instance = build(tmpcs, {(0, 1): 0.0, (1, 2): 0.0}, devices=3, microbatches=4)
    assert_best(instance, FlushSchedule.ONE_F_ONE_B)
    one_replica = Restrictions(data_parallelism=False)
    solution = solve_flush(instance, FlushSchedule.ONE_F_ONE_B, restrictions=one_replica)
    assert solution.plan is not None
    assert [stage.layers for stage in solution.plan.stages] == [(0,), (1,), (2,)]


def assert_best(
    instance: Instance,
    schedule: FlushSchedule,
    *,
    restrictions: Restrictions = Restrictions(),
    roles: tuple[Role, ...] = (None,),
    step: StepTerms = StepTerms(),
) -> None:
    wanted = brute_force(instance, schedule.value, step.all_reduce.factor, roles)
    solution = solve_flush(instance, schedule, restrictions=restrictions, step=step)
    if wanted is None:
        assert solution.status is Status.INFEASIBLE
        assert solution.infeasibility is not None
        return
    assert solution.status is Status.OPTIMAL
    assert solution.plan is not None
    wanted_s = wanted.batch_s / instance.microbatches
    assert solution.time_per_sample_s == pytest.approx(wanted_s, rel=1e-9)
    assert solution.lower_bound_s <= wanted_s * (1.0 + 1e-9)
    batch_s = plan_batch_s(instance, solution.plan, schedule.value, step.all_reduce.factor)
    assert batch_s == pytest.approx(wanted.batch_s, rel=1e-9)
