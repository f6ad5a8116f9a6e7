"""The best plans of different shapes: each the best of its own, the known one among them, told apart where they tie."""

from __future__ import annotations

import math

import pytest

import piper_ray
from piper_ray.export.files import Target
from piper_ray.export.targets import export_plan
from piper_ray.model.constraints import DataParallelDegrees, PipelinedChunks, Restrictions, TensorParallelDegrees
from piper_ray.model.one_mode import OneMode
from piper_ray.model.options import SolveOptions
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.planners.alternatives import best_plans
from piper_ray.runtimes.runtime import RUNTIMES, RuntimeName
from tests.export_support import llama

MEGATRON = RUNTIMES[RuntimeName.MEGATRON]


def kept(schedule: ScheduleName) -> Restrictions:
    return MEGATRON.restricted(Restrictions(), llama(4), schedule, 8)


def shape_of(plan: piper_ray.Plan) -> tuple[int, int]:
    return plan.stages[0].data_parallel_degree, plan.stages[0].tensor_parallel_degree


def test_each_is_the_best_of_its_degrees_and_none_is_left_out() -> None:
    """Against a solve of each pair of degrees."""
    instance, rules = llama(4), kept(ScheduleName.ONE_F_ONE_B)
    solution = piper_ray.solve(instance, restrictions=rules, schedule="1f1b")
    found = best_plans(instance, rules, ScheduleName.ONE_F_ONE_B, solution, count=4, tolerance=1e-6)
    best_s: dict[tuple[int, int], float] = {}
    for t in (1, 2, 4, 8):
        for d in (x for x in rules.data_parallel_degrees(instance) if x * t <= instance.devices):
            asked = [TensorParallelDegrees((t,)), DataParallelDegrees((d,))]
            one = piper_ray.solve(
                instance, restrictions=rules.without(TensorParallelDegrees).adding(*asked), schedule="1f1b"
            )
            best_s[d, t] = math.inf if one.time_per_sample_s is None else one.time_per_sample_s
    expected = sorted(best_s.items(), key=lambda item: item[1])[:4]
    assert [shape_of(one.plan) for one in found.found] == [shape for shape, _ in expected]
    assert [one.time_s for one in found.found] == pytest.approx([time_s for _, time_s in expected], rel=1e-5)
    assert found.found[0].plan == solution.plan


def test_the_known_plan_is_there_when_the_time_is_up() -> None:
    instance, rules = llama(4), kept(ScheduleName.ONE_F_ONE_B)
    solution = piper_ray.solve(instance, restrictions=rules, schedule="1f1b")
    ended: piper_ray.Stop[object] = piper_ray.Stop()
    ended.request()
    found = best_plans(instance, rules, ScheduleName.ONE_F_ONE_B, solution, count=3, stop=ended)
    assert [one.plan for one in found.found] == [solution.plan]
    assert found.left_from_s is not None
    assert found.looked_at == 0


def test_chunks_for_a_runtime_are_of_several_ranks() -> None:
    """On a single rank, which is best here, they are no pipeline, and no runtime takes them."""
    instance, schedule = llama(4), Schedule(ScheduleName.INTERLEAVED, 2)
    rules = kept(ScheduleName.INTERLEAVED)
    options = SolveOptions(gap=0.5)
    free = piper_ray.solve(
        instance, restrictions=rules.without(PipelinedChunks).without(OneMode), schedule=schedule, options=options
    )
    assert free.plan is not None
    assert len(free.plan.stages) == 2
    found = piper_ray.solve(instance, restrictions=rules, schedule=schedule, options=options)
    assert found.plan is not None
    assert len(found.plan.stages) > 2
    export_plan(instance, found.plan, found.schedule, Target.MEGATRON, 8)
    open_chunks = piper_ray.solve(instance, restrictions=rules, schedule="interleaved", options=options)
    assert open_chunks.plan is not None
    assert open_chunks.schedule.v == 1 or len(open_chunks.plan.stages) > open_chunks.schedule.v
