"""Makes a plan from the stages that the tables found: the layers of each stage and their TMPCs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from piper_ray.cost.plan import cost_of, places, stage_of
from piper_ray.cost.stage import in_flight
from piper_ray.engine.evaluation.outcome import TracedStage
from piper_ray.engine.kernels.knapsack import INFEASIBLE, TOO_HARD, least_cost
from piper_ray.engine.kernels.selection import stage_items
from piper_ray.engine.kernels.types import IndexArray, Items, StageKey
from piper_ray.engine.lattice.contraction import Contraction
from piper_ray.engine.ledger import Inexact
from piper_ray.engine.tables.problem import Problem
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan, Stage


class ValuedPlan(NamedTuple):
    """A plan and its time per sample, in s."""

    plan: Plan
    value_s: float

    @property
    def devices(self) -> int:
        return self.plan.devices

    @property
    def stages(self) -> int:
        return len(self.plan.stages)

    @property
    def rank(self) -> tuple[float, ...]:
        """The faster plan is preferred, even by the least difference."""
        return (self.value_s,)

    @classmethod
    def of(cls, instance: Instance, plan: Plan) -> ValuedPlan:
        return cls(plan, cost_of(instance, plan).sample_s)


class _StageKey(NamedTuple):
    """All that determines a stage's choice of TMPCs in one problem."""

    outer: int
    inner: int
    variant: int
    data_parallel_degree: int
    in_flight: int

    @classmethod
    def of(cls, traced: TracedStage) -> _StageKey:
        d = traced.data_parallel_degree
        return cls(traced.outer, traced.inner, traced.variant, d, in_flight(traced.later_sum, d))


@dataclass
class _Made:
    """The stages made for the latest problem. Successive plans of a search share most of them."""

    _problem: Problem | None = None
    _stages: dict[_StageKey, Stage] = field(default_factory=dict)

    def of(self, problem: Problem) -> dict[_StageKey, Stage]:
        if problem is not self._problem:
            self._problem, self._stages = problem, {}
        return self._stages


@dataclass(frozen=True)
class Planning:
    """Turns stages of the contracted graph into plans of the instance. Each stage runs as fast as its memory allows."""

    instance: Instance
    contraction: Contraction
    _made: _Made = field(default_factory=_Made, repr=False, compare=False)

    def plan(self, problem: Problem, stages: Sequence[TracedStage]) -> Plan:
        """Returns the plan, with layers in the order of the file."""
        return Plan(tuple(self._stage(problem, stage) for stage in stages))

    def valued(self, problem: Problem, stages: Sequence[TracedStage], known: ValuedPlan | None = None) -> ValuedPlan:
        """Returns the plan with its value. known: a valued plan that may turn out to be the same one."""
        plan = self.plan(problem, stages)
        if known is not None and plan == known.plan:
            return known
        sample_s, fault = cost_of(self.instance, plan)
        if fault is not None:
            raise Inexact(f"of a plan that is to fit, {fault}")
        return ValuedPlan(plan, sample_s)

    def chose_best(self, problem: Problem, stages: Sequence[TracedStage]) -> bool:
        """Whether each stage of the plan made last has choices known to be the fastest, so that no budget decided
        them."""
        made = self._made.of(problem)
        return all(_StageKey.of(stage) in made for stage in stages)

    @cached_property
    def _place(self) -> Mapping[int, int]:
        return places(self.instance)

    @cached_property
    def _groups(self) -> Mapping[int, tuple[int, ...]]:
        return self.contraction.members(self.instance)

    def _stage(self, problem: Problem, traced: TracedStage) -> Stage:
        key, made = _StageKey.of(traced), self._made.of(problem)
        if key in made:
            return made[key]
        choices, are_best = _choices(problem, traced)
        stage = self._of_choices(problem, traced, choices)
        if are_best:
            made[key] = stage
        return stage

    def _of_choices(self, problem: Problem, traced: TracedStage, choices: Sequence[tuple[int, int]]) -> Stage:
        graph, options = problem.workload.lattice.graph, problem.workload.options
        variant = options.variants[traced.variant]
        tmpc_ids: dict[int, str] = {}
        for v, option in choices:
            kept = graph.layer_ids[v]
            for layer_id in self._groups[kept]:
                if layer_id == kept:
                    tmpc_ids[layer_id] = options.tmpcs[traced.variant][v][option].id
                else:
                    free = self.contraction.free_tmpc(variant.tmpcs[layer_id])
                    assert free is not None, "contraction merges only layers that are free in this variant"
                    tmpc_ids[layer_id] = free.id
        return stage_of(self._place, tmpc_ids, traced.data_parallel_degree, variant.degree, variant.kind)


def items_of(problem: Problem, traced: TracedStage) -> tuple[IndexArray, Items]:
    """Returns a traced stage's vertices, and the cost and memory of each option in this stage."""
    stage, d = StageKey(traced.outer, traced.inner, traced.variant), traced.data_parallel_degree
    vertices, items = stage_items(stage, d, in_flight(traced.later_sum, d), problem.tables)
    return vertices, items


def _choices(problem: Problem, traced: TracedStage) -> tuple[list[tuple[int, int]], bool]:
    """Returns for each vertex of the stage the number of its option, and whether they are known to take the least time
    within the memory. If that was too hard to compute, they keep the budget with which the stage was found.
    """
    vertices, items = items_of(problem, traced)
    choice = np.empty(vertices.size, np.int64)
    limit, budget_s = problem.cluster.memory_bytes, traced.budget_s
    best = least_cost(items, limit, np.inf, False, choice)
    are_best = best != TOO_HARD
    if not are_best:  # then use the choice that the evaluation found
        best = least_cost(items, limit, budget_s, True, choice)
    if best == INFEASIBLE:
        raise Inexact("a stage that is to fit does not")
    if best == TOO_HARD:
        raise AssertionError("a stage of the plan has no choice")
    options = choice - items.start[:-1]
    return list(zip(vertices.tolist(), options.tolist(), strict=True)), are_best
