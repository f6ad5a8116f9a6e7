"""Blocks of operators with one d and one t for all stages: plans of layers, and bounds that hold for all of them."""

from __future__ import annotations

from functools import cache

import pytest

import piper_ray
from piper_ray import SolveOptions, Status
from piper_ray.model.constraints import AllDevices, Constraint, Recompute, Restrictions, SameDegrees, StageCount
from piper_ray.model.events import Event, StepFinished
from piper_ray.model.instance import Instance
from piper_ray.model.options import Contract
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.model.solution import Solution
from piper_ray.model.stop import Stop
from tests.instances import equal_chain, two_towers

ONE_THREAD = SolveOptions(threads=1)
BY_BLOCKS = SolveOptions(threads=1, contract=Contract.OPERATORS)
TOWERS = {
    "ample": two_towers(10, devices=8, microbatches=8, memory_bytes=1e6),
    "tight": two_towers(10, devices=8, microbatches=8, memory_bytes=70.0),
}
SAME = Restrictions(constraints=[SameDegrees()])


@pytest.fixture(autouse=True)
def _few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piper_ray.engine.blocks.block_instance.MOST_DOWNSETS", 30)


@cache
def optimum(name: str, schedule: str) -> Solution:
    return piper_ray.solve(TOWERS[name], schedule=schedule, restrictions=SAME, options=ONE_THREAD)


def assert_sound(instance: Instance, found: Solution, schedule: str, restrictions: Restrictions = SAME) -> None:
    """A plan of the layers that takes what is said."""
    assert found.plan is not None
    assert found.schedule.name.value == schedule
    evaluation = piper_ray.evaluate(instance, found.plan, restrictions=restrictions, schedule=schedule)
    assert found.time_per_sample_s == pytest.approx(evaluation.time_per_sample_s, rel=1e-9)
    assert found.lower_bound_s <= evaluation.time_per_sample_s


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "2bw"])
@pytest.mark.parametrize("name", TOWERS)
def test_value_and_bound_enclose_the_optimum(name: str, schedule: str) -> None:
    instance, exact = TOWERS[name], optimum(name, schedule)
    found = piper_ray.solve(instance, schedule=schedule, restrictions=SAME, options=BY_BLOCKS)
    assert found.blocks is not None
    assert found.blocks.layers == 22
    assert found.blocks.downsets <= 30
    assert found.blocks.downsets_before == exact.stats.downsets
    assert exact.time_per_sample_s is not None
    assert found.lower_bound_s <= exact.time_per_sample_s * (1 + 1e-9)
    if found.plan is None:
        assert found.status is Status.UNKNOWN
        return
    assert_sound(instance, found, schedule)
    assert found.time_per_sample_s is not None
    assert found.blocks.time_per_sample_s is not None
    assert exact.time_per_sample_s * (1 - 1e-9) <= found.time_per_sample_s <= found.blocks.time_per_sample_s
    if found.status is Status.OPTIMAL:
        assert found.time_per_sample_s == pytest.approx(exact.time_per_sample_s, rel=2e-9)
    else:
        assert found.stopped_by == "blocks of operators"


@pytest.mark.parametrize("rule", [AllDevices(), StageCount(2)])
@pytest.mark.parametrize("recompute", [Recompute.AUTO, Recompute.ALL_OR_NONE, Recompute.NEVER])
def test_constraints_are_kept(rule: Constraint, recompute: Recompute) -> None:
    restrictions = Restrictions(recompute=recompute, constraints=[rule])
    instance = TOWERS["ample"]
    found = piper_ray.solve(instance, schedule="1f1b", restrictions=restrictions, options=BY_BLOCKS)
    assert found.blocks is not None
    assert_sound(instance, found, "1f1b", restrictions)


def test_few_layers_are_planned_as_they_are() -> None:
    chain = equal_chain(5)
    found = piper_ray.solve(chain, schedule="1f1b", options=BY_BLOCKS)
    assert found.blocks is None
    assert found.time_per_sample_s == piper_ray.solve(chain, schedule="1f1b", options=ONE_THREAD).time_per_sample_s


def test_a_stop_keeps_a_plan_of_layers() -> None:
    stop: Stop[Solution] = Stop()
    offered: list[Solution] = []

    def listener(event: Event) -> None:  # noqa: ARG001 - at each of them
        answer = stop.answer()
        if answer is not None and answer.plan is not None:
            offered.append(answer)
            stop.request()

    instance = TOWERS["ample"]
    found = piper_ray.solve(instance, schedule="1f1b", options=BY_BLOCKS, listener=listener, stop=stop)
    assert found.stopped_by == "interrupt"
    for solution in (found, offered[0]):
        assert solution.blocks is not None
        assert_sound(instance, solution, "1f1b")


def test_the_listener_hears_of_the_blocks() -> None:
    steps: list[str] = []

    def listener(event: Event) -> None:
        if isinstance(event, StepFinished):
            steps.append(event.step)

    piper_ray.solve(TOWERS["ample"], schedule="gpipe", options=BY_BLOCKS, listener=listener)
    assert steps == ["blocks", "lattice", "stage costs"]


@pytest.mark.long
def test_blocks_under_schedules_with_chunks() -> None:
    """Value and plan are of the layers, and the bound holds for plans that cut blocks. Of two chunks: test_capabilities
    leaves their number open.
    """
    instance, schedule = TOWERS["tight"], ScheduleName.ZB_V
    found = piper_ray.solve(instance, schedule=Schedule(schedule, 2), options=BY_BLOCKS)
    assert found.blocks is not None
    assert found.blocks.downsets <= 30
    exact = piper_ray.solve(instance, schedule=Schedule(schedule, 2), options=ONE_THREAD)
    if found.plan is not None:
        evaluation = piper_ray.evaluate(instance, found.plan, schedule=found.schedule)
        assert found.time_per_sample_s == pytest.approx(evaluation.time_per_sample_s, rel=1e-9)
    if exact.time_per_sample_s is not None:
        assert found.lower_bound_s <= exact.time_per_sample_s
