"""Constraints: what they leave to planners, what breaks them, and how they are told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

import piper_ray
from piper_ray import InvalidPlan, Plan, Restrictions, Stage, UsageError
from piper_ray.engine.checkpoint.identity import Identity
from piper_ray.model.constraints import (
    Constraint,
    NoDataParallelism,
    NoTensorParallelism,
    Recompute,
    RecomputeRule,
    Scope,
)
from piper_ray.model.instance import Instance
from tests.brute_force import brute_force
from tests.instances import RECOMPUTE, VANILLA, equal_chain, random_instance
from tests.lengths import long_after
from tests.solver_support import ONE_THREAD


@dataclass(frozen=True)
class Degrees(Constraint):
    """Only these tensor-parallel degrees."""

    tensor: tuple[int, ...]

    def admits_tensor_parallel_degree(self, degree: int) -> bool:
        return degree in self.tensor

    def violations(self, instance: Instance, plan: Plan) -> Iterator[str]:  # noqa: ARG002
        for number, stage in enumerate(plan.stages, start=1):
            if stage.tensor_parallel_degree not in self.tensor:
                yield f"stage {number}: t = {stage.tensor_parallel_degree}"


@dataclass(frozen=True)
class EvenReplicas(Constraint):
    """No odd data-parallel degree."""

    def admits_data_parallel_degree(self, degree: int) -> bool:
        return degree % 2 == 0

    def violations(self, instance: Instance, plan: Plan) -> Iterator[str]:  # noqa: ARG002
        for number, stage in enumerate(plan.stages, start=1):
            if stage.data_parallel_degree % 2:
                yield f"stage {number}: d = {stage.data_parallel_degree}"


@dataclass(frozen=True)
class OneStage(Constraint):
    """A constraint on the whole plan."""

    scope: ClassVar[Scope] = Scope.PLAN

    def violations(self, instance: Instance, plan: Plan) -> Iterator[str]:  # noqa: ARG002
        if len(plan.stages) > 1:
            yield f"{len(plan.stages)} stages, but one is wanted"


def test_names_and_objects_are_the_same() -> None:
    assert Restrictions() == Restrictions(constraints=[RecomputeRule(Recompute.AUTO)])
    assert Restrictions().constraints == ()
    named = Restrictions(tensor_parallelism=False, data_parallelism=False, recompute="never")
    assert named == Restrictions(constraints=[RecomputeRule("never"), NoDataParallelism(), NoTensorParallelism()])  # type: ignore[arg-type]
    assert (named.tensor_parallelism, named.data_parallelism, named.recompute) == (False, False, Recompute.NEVER)
    assert hash(named) == hash(replace(named))
    assert named.adding(Degrees((1, 2))).others == (Degrees((1, 2)),)
    assert named.adding(NoTensorParallelism()) == named


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tensor_parallelism": "no"}, "tensor_parallelism must be True or False"),
        ({"recompute": "sometimes"}, "recompute 'sometimes' is unknown"),
        ({"constraints": ["no TP"]}, "constraints must be Constraint objects"),
        ({"constraints": 3}, "constraints must be Constraint objects"),
        ({"recompute": "never", "constraints": [RecomputeRule(Recompute.ALWAYS)]}, "contradict each other"),
        ({"constraints": [Degrees((1,)), Degrees((2,))]}, "contradict each other"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Restrictions(**arguments)


@pytest.mark.parametrize("constraint", [Degrees((2,)), EvenReplicas()])
def test_solver_and_planners_keep_a_new_constraint_on_stages(constraint: Constraint) -> None:
    """The best of all plans that keep it, found by trying all."""
    found_some = 0
    for seed in range(40):
        instance = random_instance(seed, most_layers=4, most_devices=5, most_tmpcs=2)
        restrictions = Restrictions(constraints=[constraint])
        solution = piper_ray.solve(instance, restrictions=restrictions, options=ONE_THREAD)
        best = brute_force(instance, restrictions)
        if best is None:
            assert solution.plan is None, seed
            continue
        assert solution.plan is not None, seed
        assert solution.time_per_sample_s == pytest.approx(float(best.time_per_sample_s), rel=1e-9), seed
        piper_ray.evaluate(instance, solution.plan, restrictions=restrictions)
        found_some += 1
        for planner in ("megatron", "pipedream-2bw", "pipedream", "piper-published"):
            result = piper_ray.baselines.plan(instance, planner, restrictions=restrictions)
            if result.plan is not None:
                piper_ray.evaluate(instance, result.plan, restrictions=restrictions)
    assert found_some > 5


def test_a_constraint_on_the_plan_is_refused_by_who_cannot_keep_it() -> None:
    instance, restrictions = equal_chain(3, devices=3, memory_bytes=1e6), Restrictions(constraints=[OneStage()])
    for run in (piper_ray.solve, piper_ray.frontier):
        with pytest.raises(UsageError, match=r"stage by stage and cannot keep OneStage\(\)"):
            run(instance, restrictions=restrictions)
    result = piper_ray.baselines.plan(instance, "pipedream-2bw", restrictions=restrictions)
    assert result.plan is None or len(result.plan.stages) == 1


def plan_of(*stages: tuple[int, int, dict[int, str]]) -> Plan:
    return Plan(tuple(Stage(tuple(ids), d, t, ids) for d, t, ids in stages))


@pytest.mark.parametrize(
    ("restrictions", "broken"),
    [
        (Restrictions(), []),
        (Restrictions(tensor_parallelism=False), ["stage 2: tensor-parallel degree 2, but none is allowed"]),
        (Restrictions(data_parallelism=False), ["stage 1: data-parallel degree 2, but none is allowed"]),
        (Restrictions(recompute="never"), ["stage 1: recomputation is to be never, layers such as 1 break that"]),
        (Restrictions(recompute="always"), [
            "stage 1: recomputation is to be always, layers such as 0 break that",
            "stage 2: recomputation is to be always, layers such as 2, 3 break that",
        ]),
        (Restrictions(recompute="all-or-none"), [
            "stage 1: recomputation is to be all-or-none, layers such as 1, 0 break that",
        ]),
    ],
)  # fmt: skip
def test_evaluate_tells_what_a_plan_breaks(restrictions: Restrictions, broken: list[str]) -> None:
    instance = equal_chain(4, devices=4, microbatches=4, memory_bytes=1e6)
    plan = plan_of((2, 1, {0: VANILLA, 1: RECOMPUTE}), (1, 2, {2: VANILLA, 3: VANILLA}))
    if not broken:
        piper_ray.evaluate(instance, plan, restrictions=restrictions)
        return
    with pytest.raises(InvalidPlan) as caught:
        piper_ray.evaluate(instance, plan, restrictions=restrictions)
    assert list(caught.value.violations) == broken


@pytest.mark.parametrize("rule", long_after(1, Recompute))
def test_what_is_planned_under_a_rule_keeps_it(rule: Recompute) -> None:
    for seed in range(30):
        instance = random_instance(seed)
        for restrictions in (Restrictions(recompute=rule), Restrictions(False, False, rule)):
            found = piper_ray.solve(instance, restrictions=restrictions, options=ONE_THREAD).plan
            if found is not None:
                piper_ray.evaluate(instance, found, restrictions=restrictions)


def test_a_checkpoint_s_identity_names_constraints() -> None:
    instance = equal_chain(2)
    usual = Identity.of(instance, Restrictions(False)).facts["options"]
    assert usual == {"tensor parallelism": "forbidden", "data parallelism": "allowed", "recompute": "auto"}
    more = Identity.of(instance, Restrictions(constraints=[Degrees((1, 2))])).facts["options"]
    assert more["Degrees"] == "Degrees(tensor=(1, 2))"
