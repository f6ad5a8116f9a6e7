"""A frontier is one solve for each point: the same values, and the same plans to the byte."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_ray.engine.frontier.frontier import frontier
from piper_ray.engine.frontier.result import CurveAdvanced, Frontier
from piper_ray.engine.solve import solve
from piper_ray.evaluate import evaluate
from piper_ray.model.constraints import (
    AllDevices,
    Constraint,
    KeepOrder,
    Recompute,
    Restrictions,
    SameDegrees,
    StageCount,
    TensorParallelDegrees,
)
from piper_ray.model.errors import UsageError
from piper_ray.model.events import Note
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.solution import Status
from piper_ray.model.stop import Stop, StoppedBy
from piper_ray.simulate.run import simulate
from tests.brute_force import brute_force
from tests.flush_instances import uneven_layers
from tests.instances import build, instances, parallel_branches, random_instance, tmpc, two_towers
from tests.lengths import long_after
from tests.solver_support import ONE_THREAD, PROOF

NO_RESTRICTION = Restrictions()


def assert_one_solve_for_each_point(
    instance: Instance, restrictions: Restrictions = NO_RESTRICTION, found: Frontier | None = None
) -> None:
    found = found or frontier(instance, restrictions=restrictions, options=ONE_THREAD)
    values = found.by_devices()
    for point in found.points():
        expected = solve(instance.replace(devices=point.devices), restrictions=restrictions, options=ONE_THREAD)
        assert point.status is expected.status, point
        plan = found.plan(point.devices)
        if expected.time_per_sample_s is None:
            assert plan is None
            assert values[point.devices] is None
            continue
        assert values[point.devices] == pytest.approx(expected.time_per_sample_s, rel=2 * PROOF, abs=1e-99)
        assert plan is not None
        assert expected.plan is not None
        assert plan.to_dict() == expected.plan.to_dict()
        assert point.lower_bound_s <= expected.time_per_sample_s
        assert point.gap is not None
        assert point.gap <= PROOF * (1 + 1e-6)


@pytest.mark.parametrize("seed", long_after(1, range(4)))
def test_random_instances(seed: int) -> None:
    for number in range(6):
        assert_one_solve_for_each_point(random_instance(100 * seed + number).replace(devices=9))


@given(instances(most_layers=4, most_degrees=3))
def test_small_instances(instance: Instance) -> None:
    assert_one_solve_for_each_point(instance.replace(devices=8))


@pytest.mark.parametrize("rising", [True, False])
def test_replicas_that_fewer_devices_do_not_allow(rising: bool) -> None:
    """Plans are those of a solve in whatever order they are asked for: what runs on three replicas at least too."""
    fast = replace(tmpc(6, name="fast"), least_data_parallel_degree=3)
    instance = build({0: {1: [tmpc(12), fast], 4: [tmpc(5)]}}, {}, devices=4, microbatches=12)
    found = frontier(instance, options=ONE_THREAD)
    for devices in range(1, 5) if rising else range(4, 0, -1):
        expected = solve(instance.replace(devices=devices), options=ONE_THREAD)
        assert expected.plan is not None
        assert found.plan(devices) == expected.plan


@pytest.mark.parametrize("name", ["towers", "branches"])
def test_parallel_graphs(name: str) -> None:
    towers = two_towers(6, devices=14, microbatches=12, memory_bytes=80.0)
    assert_one_solve_for_each_point(towers if name == "towers" else parallel_branches(3, 3).replace(devices=12))


@pytest.mark.parametrize(
    "restrictions",
    long_after(
        1,
        [
            Restrictions(tensor_parallelism=False),
            Restrictions(data_parallelism=False),
            Restrictions(recompute=Recompute.ALL_OR_NONE),
            Restrictions(recompute=Recompute.NEVER),
            Restrictions(recompute=Recompute.ONE_FOR_ALL),
            Restrictions(constraints=[KeepOrder()]),
        ],
    ),
    ids=repr,
)
def test_restrictions(restrictions: Restrictions) -> None:
    for seed in range(6):
        assert_one_solve_for_each_point(random_instance(seed, most_layers=4).replace(devices=7), restrictions)


@pytest.mark.long
def test_a_graph_that_is_too_wide_to_list(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = two_towers(5, devices=8, microbatches=8, memory_bytes=80.0)
    listed = frontier(instance, options=ONE_THREAD).by_devices()
    monkeypatch.setattr("piper_ray.engine.preparation._MANY", 1)
    monkeypatch.setattr("piper_ray.engine.preparation._MANY_A_LAYER", 0)
    told: list[object] = []

    def hear(event: object) -> None:
        told.append(event)

    found = frontier(instance, options=ONE_THREAD, listener=hear)
    assert found.by_devices() == listed
    assert any(isinstance(event, Note) and "only those that a best plan can use" in event.text for event in told)


@given(instances(most_layers=4), st.sets(st.integers(1, 60), min_size=1, max_size=4))
def test_any_numbers_of_devices(instance: Instance, devices: set[int]) -> None:
    wanted = tuple(sorted(devices))
    found = frontier(instance, devices=wanted, options=ONE_THREAD)
    assert [point.devices for point in found.points()] == list(wanted)
    assert_one_solve_for_each_point(instance, found=found)


@pytest.mark.parametrize("seed", long_after(4, range(6)))
def test_against_all_plans(seed: int) -> None:
    """Along the devices, and along the bound on the sum of data-parallel degrees."""
    instance = random_instance(seed, most_layers=4).replace(devices=5)
    found = frontier(instance, options=ONE_THREAD)
    for devices, value_s in found.by_devices().items():
        best = brute_force(instance.replace(devices=devices))
        assert value_s == (None if best is None else pytest.approx(float(best.time_per_sample_s), rel=2 * PROOF))
    assert list(found.by_budget()) == list(range(1, instance.data_parallel_limit + 1))
    for budget, value_s in found.by_budget().items():
        bounded = instance.replace()
        vars(bounded)["data_parallel_limit"] = budget  # which brute force goes by
        best = brute_force(bounded)
        assert value_s == (None if best is None else pytest.approx(float(best.time_per_sample_s), rel=2 * PROOF))


@pytest.mark.parametrize("height", [6, 12])
def test_bounds_on_the_sum_hold_for_plans_of_chains(height: int) -> None:
    """Those of large lattices begin with one."""
    instance = two_towers(height, devices=12, microbatches=12, memory_bytes=20.0 * height)
    points = frontier(instance, devices=[12], options=ONE_THREAD).budget_points()
    assert points[-1].time_per_sample_s == solve(instance, options=ONE_THREAD).time_per_sample_s
    values_s = [np.inf if point.time_per_sample_s is None else point.time_per_sample_s for point in points]
    assert values_s == sorted(values_s, reverse=True)
    assert len({*values_s}) > 1


@pytest.mark.parametrize("seed", long_after(2, range(6)))
def test_threads_change_no_byte(seed: int) -> None:
    instance = random_instance(seed, most_layers=7).replace(devices=40, microbatches=12)
    alone, together = (frontier(instance, options=SolveOptions(threads=threads)) for threads in (1, 3))
    assert alone.points() == together.points()
    assert alone.budget_points() == together.budget_points()
    assert alone.stats.evaluations == together.stats.evaluations
    for point in alone.points():
        one, other = alone.plan(point.devices), together.plan(point.devices)
        assert (one and one.to_dict()) == (other and other.to_dict())


@pytest.mark.parametrize("seed", long_after(3, range(10)))
def test_a_gap_holds(seed: int) -> None:
    instance = random_instance(seed, most_layers=6).replace(devices=12)
    proved = frontier(instance, options=ONE_THREAD).by_devices()
    rough = frontier(instance, options=SolveOptions(threads=1, gap=0.1))
    for point in rough.points():
        value = proved[point.devices]
        if value is None:
            assert point.status is Status.INFEASIBLE
            continue
        assert point.time_per_sample_s is not None
        assert point.gap is not None
        assert point.gap <= 0.1 + PROOF
        assert point.lower_bound_s <= value * (1 + PROOF)
        assert value <= point.time_per_sample_s * (1 + PROOF)
        plan = rough.plan(point.devices)
        assert plan is not None
        taken_s = evaluate(instance.replace(devices=point.devices), plan).time_per_sample_s
        assert taken_s <= point.time_per_sample_s * (1 + PROOF)


@pytest.mark.long
@pytest.mark.parametrize(
    ("schedule", "rule"), [("1f1b", None), ("1f1b", StageCount(2)), ("gpipe", AllDevices()), ("2bw", None)]
)
def test_one_d_and_one_t_for_all_stages(schedule: str, rule: Constraint | None) -> None:
    restrictions = Restrictions(constraints=(SameDegrees(), *([] if rule is None else [rule])))
    for seed in range(4):
        instance = (random_instance(seed, most_layers=5) if seed % 2 else uneven_layers(seed)).replace(devices=9)
        found = frontier(instance, restrictions=restrictions, options=ONE_THREAD, schedule=schedule)
        assert found.schedule.name.value == schedule
        for point in found.points():
            here = instance.replace(devices=point.devices)
            expected = solve(here, restrictions=restrictions, options=ONE_THREAD, schedule=schedule)
            assert point.status is expected.status, point
            assert (point.time_per_sample_s is None) == (expected.time_per_sample_s is None)
            if expected.time_per_sample_s is not None:
                assert point.time_per_sample_s == pytest.approx(expected.time_per_sample_s, rel=2 * PROOF)
            assert point.lower_bound_s == pytest.approx(expected.lower_bound_s, rel=2 * PROOF)
            assert found.plan(point.devices) == expected.plan
            solution = found.solution(point.devices)
            assert (solution.status, solution.plan) == (expected.status, expected.plan)
            assert solution.schedule == expected.schedule
        if not isinstance(rule, AllDevices):
            values = [np.inf if x.time_per_sample_s is None else x.time_per_sample_s for x in found.points()]
            assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("rules", [(), (AllDevices(),)])
def test_under_a_flush_a_stop_leaves_bounds_and_plans(rules: tuple[Constraint, ...]) -> None:
    instance, wanted = two_towers(8, devices=16, microbatches=16, memory_bytes=60.0), range(2, 17)
    restrictions = Restrictions(constraints=rules)
    whole = frontier(instance, devices=wanted, restrictions=restrictions, options=ONE_THREAD, schedule="1f1b")
    optima = whole.by_devices()
    closed = 0

    def request_after_two(event: object) -> None:
        nonlocal closed
        if isinstance(event, CurveAdvanced):
            closed = event.closed
            if closed >= 2:
                stop.request()

    stop: Stop[Frontier] = Stop()
    ended = frontier(
        instance,
        devices=wanted,
        restrictions=restrictions,
        options=ONE_THREAD,
        schedule="1f1b",
        stop=stop,
        listener=request_after_two,
    )
    offered = stop.answer()
    assert offered is not None
    assert ended.stopped_by is StoppedBy.INTERRUPT
    assert closed >= 2
    for found in (ended, offered):
        statuses = {point.status for point in found.points()}
        assert statuses <= set(Status) - {Status.INFEASIBLE}
        assert found.points()[-1].status is Status.OPTIMAL
        for point in found.points():
            optimum_s = optima[point.devices]
            plan = found.plan(point.devices)
            if optimum_s is None:
                assert plan is None
                continue
            assert point.lower_bound_s <= optimum_s * (1 + PROOF)
            if plan is not None:
                here = instance.replace(devices=point.devices)
                simulated_s = simulate(here, plan, "1f1b").time_per_sample_s
                assert simulated_s == pytest.approx(point.time_per_sample_s)
                assert list(restrictions.violations(here, plan)) == []
                assert plan.devices <= point.devices


def test_under_a_flush_a_layer_without_a_choice_is_named() -> None:
    restrictions = Restrictions(constraints=[TensorParallelDegrees((64,))])
    found = frontier(
        random_instance(1), devices=[1, 2], restrictions=restrictions, options=ONE_THREAD, schedule="gpipe"
    )
    assert found.reason is not None
    assert "layer" in found.reason
    assert [point.status for point in found.points()] == [Status.INFEASIBLE] * 2


def test_bounds_on_the_sum_of_d_are_for_plans_with_several() -> None:
    found = frontier(random_instance(1), devices=[2], options=ONE_THREAD, schedule="1f1b")
    with pytest.raises(UsageError, match="schedule 2bw"):
        found.budget_points()
    with pytest.raises(UsageError, match="not asked for 3 devices"):
        found.solution(3)


def test_what_a_frontier_cannot_plan_for_is_refused() -> None:
    with pytest.raises(UsageError, match="no frontier under schedule pipedream"):
        frontier(random_instance(1), schedule="pipedream")
    with pytest.raises(UsageError, match="SameDegrees"):
        frontier(random_instance(1), restrictions=Restrictions(constraints=[StageCount(2)]))
