"""Asynchronous plans whose rate is sustained: proved by simulation, and never better than any that sustains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import piper_ray
from piper_ray.model.constraints import Restrictions, SustainedRate
from piper_ray.model.errors import InvalidPlan, UsageError
from piper_ray.model.instance import Instance, Layer, Tmpc
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.schedule import PAPERS_SCHEDULE
from piper_ray.simulate.assemble import most_bytes, sustaining_in_flight
from piper_ray.simulate.run import SimulationOptions
from tests.instances import random_instance
from tests.solver_support import ONE_THREAD

KEPT = Restrictions(constraints=[SustainedRate()])


def three_layers(memory_bytes: float, fixed_bytes: float = 0.0) -> Instance:
    """A second each for a microbatch on one device, two for the one in the middle; 1 byte for each in flight."""
    layers = [
        Layer(v, "", {1: (Tmpc("x", time_s, 0.0, 1.0, fixed_bytes, forward_s=time_s / 3),)})
        for v, time_s in enumerate((3.0, 6.0, 3.0))
    ]
    edges = [piper_ray.Edge(0, 1, 0.0), piper_ray.Edge(1, 2, 0.0)]
    return Instance(layers, edges, 4, 8, memory_bytes, 1.0)


def one_two_one(in_flight: tuple[int, ...] | None = None) -> Plan:
    return Plan(tuple(Stage((v,), d, 1, {v: "x"}) for v, d in enumerate((1, 2, 1))), in_flight=in_flight)


def test_one_more_in_flight_than_the_rule_by_hand() -> None:
    """With d = 1, 2, 1 the paper's rule keeps 4, 2, 1; a forward pass of a third needs 5."""
    instance = three_layers(100.0)
    assert not piper_ray.simulate(instance, one_two_one(), "2bw").keeps_promise
    assert sustaining_in_flight(instance, one_two_one()) == (5, 2, 1)
    with pytest.raises(InvalidPlan, match="does not say how many microbatches in flight sustain its rate"):
        piper_ray.evaluate(instance, one_two_one(), restrictions=KEPT)
    with pytest.raises(InvalidPlan, match=r"its rate is not sustained: 3 s per microbatch, but 4\.5 s simulated"):
        piper_ray.evaluate(instance, one_two_one((4, 2, 1)), restrictions=KEPT)
    found = piper_ray.evaluate(instance, one_two_one((5, 2, 1)), restrictions=KEPT)
    assert found.time_per_sample_s == 3.0
    assert [stage.memory_bytes for stage in found.stages] == [5.0, 2.0, 1.0]
    with pytest.raises(InvalidPlan, match="stage 1: needs 5 bytes on each device with 5 microbatches in flight"):
        piper_ray.evaluate(three_layers(4.0), one_two_one((5, 2, 1)))


@pytest.mark.parametrize("in_flight", [(5, 2), (5, 0, 1)])
def test_numbers_in_flight_that_make_no_sense(in_flight: tuple[int, ...]) -> None:
    with pytest.raises(InvalidPlan, match="in flight"):
        piper_ray.evaluate(three_layers(100.0), one_two_one(in_flight))


def test_memory_for_it_is_found_or_the_plan_is_another() -> None:
    """No two layers fit on a device together."""
    roomy = piper_ray.solve(three_layers(15.0, 10.0), restrictions=KEPT, options=ONE_THREAD)
    assert roomy.status is piper_ray.Status.OPTIMAL
    assert roomy.plan is not None
    assert roomy.plan.in_flight == (5, 2, 1)
    tight = piper_ray.solve(three_layers(14.0, 10.0), restrictions=KEPT, options=ONE_THREAD)
    assert tight.status is piper_ray.Status.FEASIBLE
    assert tight.lower_bound_s == pytest.approx(3.0)
    assert tight.plan is not None
    piper_ray.evaluate(three_layers(14.0, 10.0), tight.plan, restrictions=KEPT)


def test_random_graphs(few: bool) -> None:
    """The plan sustains its rate and fits, and the bound is one on plans that need not."""
    changed = 0
    for seed in range(25 if few else 60):
        instance = random_instance(seed, most_devices=9)
        free = piper_ray.solve(instance, options=ONE_THREAD)
        found = piper_ray.solve(instance, restrictions=KEPT, options=ONE_THREAD)
        if found.plan is None:
            assert free.plan is None
            continue
        assert found.time_per_sample_s is not None
        assert found.lower_bound_s <= free.time_per_sample_s  # type: ignore[operator]
        piper_ray.evaluate(instance, found.plan, restrictions=KEPT)
        assert piper_ray.simulate(instance, found.plan, PAPERS_SCHEDULE).keeps_promise
        assert most_bytes(instance, found.plan) <= instance.memory_bytes * (1 + 1e-9)
        by_rule = replace(found.plan, in_flight=None)
        changed += not piper_ray.simulate(instance, by_rule, options=SimulationOptions()).keeps_promise
        assert piper_ray.load_plan(found.plan.to_dict(), instance) == found.plan
    assert changed >= 1


def test_it_is_for_asynchronous_plans() -> None:
    instance = three_layers(5.0)
    with pytest.raises(UsageError, match="a sustained rate is planned for under 2bw alone"):
        piper_ray.solve(instance, restrictions=KEPT, schedule="1f1b")


def test_it_is_taken_up_again(tmp_path: Path) -> None:
    """Each of its solves has a folder within the checkpoint's."""
    options = piper_ray.SolveOptions(resume=str(tmp_path / "kept"), threads=1)
    for instance in (three_layers(5.0), three_layers(1e9)):
        found = [piper_ray.solve(instance, restrictions=KEPT, options=options) for _ in range(2)]
        alone = piper_ray.solve(instance, restrictions=KEPT, threads=1)
        assert [one.plan for one in found] == [alone.plan, alone.plan]
        options = replace(options, resume=str(tmp_path / "another"))
