"""Plans for PipeDream's own schedule: the best of all plans by the referee, which the simulation agrees with."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

import piper_ray
from piper_ray.model.constraints import DataParallelDegrees, KeepOrder, Recompute, Restrictions, SameDegrees
from piper_ray.model.errors import InvalidPlan
from piper_ray.model.instance import Edge, Instance, Layer, Tmpc
from piper_ray.model.one_mode import OneMode
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.plan_rules import in_order
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.model.solution import Status
from tests.brute_force import least_evaluated_time_s
from tests.instances import random_instance
from tests.lengths import long_after
from tests.solver_support import ONE_THREAD

PIPEDREAM = "pipedream"


@pytest.mark.parametrize("seeds", long_after(1, [range(16), range(16, 32)]), ids=str)
def test_the_best_of_all_plans(seeds: range, few: bool) -> None:
    feasible = 0
    for seed in seeds[:12] if few else seeds:
        instance = small(seed)
        if seed % 2:  # whose fixed memory has one version of the weights
            instance = replace(instance, schedule=Schedule(ScheduleName.ONE_F_ONE_B)).checked_as(instance)
        expected_s = least_evaluated_time_s(instance, PIPEDREAM)
        found = piper_ray.solve(instance, schedule=PIPEDREAM, options=ONE_THREAD)
        assert found.schedule.name is ScheduleName.PIPEDREAM
        if expected_s is None:
            assert found.status is Status.INFEASIBLE
            continue
        feasible += 1
        assert found.status is Status.OPTIMAL
        assert found.plan is not None
        assert found.time_per_sample_s == pytest.approx(expected_s, rel=1e-9)
        valued = piper_ray.evaluate(instance, found.plan, schedule=PIPEDREAM)
        assert valued.time_per_sample_s == pytest.approx(expected_s, rel=1e-9)
        simulated = piper_ray.simulate(instance, found.plan, PIPEDREAM)
        assert simulated.promised_s is not None
        assert simulated.promised_s / instance.microbatches == pytest.approx(expected_s, rel=1e-9)
        for stage, rank in zip(valued.stages, simulated.stages, strict=True):
            kept = stage.in_flight_microbatches
            held = rank.activation_bytes * kept + rank.beside_bytes + kept * rank.weights_bytes
            assert stage.memory_bytes == pytest.approx(held)
    assert feasible > 5


def small(seed: int) -> Instance:
    instance = random_instance(seed, most_layers=3)
    return instance.replace(devices=min(instance.devices, 4), microbatches=Random(seed).choice([2, 4, 6]))


@pytest.mark.parametrize(
    "restrictions",
    long_after(
        2,
        [
            *(Restrictions(recompute=rule) for rule in Recompute if rule is not Recompute.AUTO),
            Restrictions(constraints=[SameDegrees()]),
            Restrictions(constraints=[OneMode(), SameDegrees()]),
            Restrictions(constraints=[OneMode()]),
            Restrictions(constraints=[DataParallelDegrees((2,))]),
        ],
    ),
    ids=repr,
)
def test_constraints_are_kept(restrictions: Restrictions) -> None:
    plans = 0
    for seed in range(4):
        instance = small(seed)
        expected_s = least_evaluated_time_s(instance, PIPEDREAM, restrictions)
        found = piper_ray.solve(instance, schedule=PIPEDREAM, restrictions=restrictions, options=ONE_THREAD)
        assert found.time_per_sample_s == (expected_s if expected_s is None else pytest.approx(expected_s, rel=1e-9))
        plans += expected_s is not None
    assert plans > 0


@pytest.mark.long
def test_the_order_of_layers_is_kept() -> None:
    kept = Restrictions(constraints=[KeepOrder()])
    plans = 0
    for seed in range(12):
        instance = small(seed)
        expected_s = least_evaluated_time_s(in_order(instance), PIPEDREAM)
        found = piper_ray.solve(instance, schedule=PIPEDREAM, restrictions=kept, options=ONE_THREAD)
        assert found.time_per_sample_s == (expected_s if expected_s is None else pytest.approx(expected_s, rel=1e-9))
        if found.plan is not None:
            plans += 1
            assert found.plan.keeps_order
            valued = piper_ray.evaluate(instance, found.plan, schedule=PIPEDREAM, restrictions=kept)
            assert valued.time_per_sample_s == pytest.approx(expected_s, rel=1e-9)
    assert plans > 3


def two_stages(d: int, fixed_bytes: float) -> tuple[Instance, Plan]:
    """12 s and 6 s; weights of 5 bytes, 3 for activations; B = 2, N = 8."""
    tmpcs = [Tmpc("v", time_s, 5.0, 3.0, fixed_bytes) for time_s in (12.0, 6.0)]
    layers = tuple(Layer(v, f"layer{v}", {1: (tmpc,)}) for v, tmpc in enumerate(tmpcs))
    instance = Instance(layers, (Edge(0, 1, 1.0),), d + 1, 8, 1000.0, 2.0)
    return instance, Plan((Stage((0,), d, 1, {0: "v"}), Stage((1,), 1, 1, {1: "v"})))


def test_by_hand() -> None:
    instance, plan = two_stages(2, 11.0)
    valued = piper_ray.evaluate(instance, plan, schedule=PIPEDREAM)
    first, last = valued.stages
    # Both replicas hand over 2 bytes at 2 a second, and sum 5 bytes of gradients after a microbatch each.
    assert first.time_s == pytest.approx(12 / 2 + 2 / (2 * 2) + 4 * (1 / 2) * 5 / (2 * 2))
    assert last.time_s == pytest.approx(6 + 2 / 2)
    # 2 microbatches in flight of the first stage, 1 of the last; one byte in addition to two versions of the weights.
    assert [stage.in_flight_microbatches for stage in valued.stages] == [2, 1]
    assert [stage.memory_bytes for stage in valued.stages] == [2 * 3 + 1 + 2 * 5, 3 + 1 + 5]
    promised = piper_ray.evaluate(instance, plan, schedule="2bw").stages[0]
    assert promised.resync_s == pytest.approx(first.resync_s * 2 / 8)
    assert promised.memory_bytes == 2 * 3 + 11


def test_versions_that_fixed_memory_does_not_hold_are_counted_all_the_same() -> None:
    instance, plan = two_stages(2, 4.0)
    valued = piper_ray.evaluate(instance, plan, schedule=PIPEDREAM)
    assert [stage.memory_bytes for stage in valued.stages] == [2 * 3 + 2 * 5, 3 + 5]


def test_memory_for_versions_that_is_not_there_is_a_fault() -> None:
    instance, plan = two_stages(2, 11.0)
    tight = instance.replace(memory_bytes=16.0)
    with pytest.raises(InvalidPlan, match="stage 1: needs 17 bytes on each device with 2 microbatches in flight"):
        piper_ray.evaluate(tight, plan, schedule=PIPEDREAM)
    assert piper_ray.solve(tight, schedule=PIPEDREAM, options=ONE_THREAD).status is Status.INFEASIBLE
    assert piper_ray.solve(tight.replace(memory_bytes=17.0), schedule=PIPEDREAM, options=ONE_THREAD).plan == plan
