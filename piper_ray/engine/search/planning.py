"""Makes a plan from the stages that the tables found: the layers of each stage and their TMPCs.

Also explains why an instance has no plan, and finds how much memory would suffice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from piper_ray.cost.bounds import ceiling_bytes, ceiling_s
from piper_ray.cost.plan import cost_of, places, stage_of
from piper_ray.cost.stage import in_flight
from piper_ray.cost.tolerances import MEMORY_TOLERANCE
from piper_ray.engine.evaluation.backend import OnProgress
from piper_ray.engine.evaluation.evaluations import Evaluations
from piper_ray.engine.evaluation.outcome import TracedStage
from piper_ray.engine.kernels.knapsack import INFEASIBLE, TOO_HARD, least_cost
from piper_ray.engine.kernels.selection import stage_items
from piper_ray.engine.kernels.types import IndexArray, Items, StageKey
from piper_ray.engine.lattice.contraction import Contraction
from piper_ray.engine.ledger import Inexact
from piper_ray.engine.search.bracket import Bracket
from piper_ray.engine.tables.problem import Problem
from piper_ray.model.figures import bytes_text
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.solution import Infeasibility


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


_BELOW = 1.0 - 1e-9


def explain(instance: Instance, problem: Problem, evaluations: Evaluations, on_progress: OnProgress) -> Infeasibility:
    """Returns, for an instance proved infeasible, the reason and the least memory per device for which there is a plan.

    ``on_progress`` is called as by ``evaluate_threshold``; if it raises, the search for that figure ends.
    """
    least_bytes = least_memory_bytes(instance, problem, evaluations, on_progress)
    if least_bytes is None:
        return Infeasibility(
            f"no plan fits on {instance.devices} devices with {instance.microbatches} microbatches, "
            "whatever the memory",
            None,
        )
    need_bytes, layer_id = _largest_layer(problem)
    if need_bytes > problem.cluster.memory_bytes:
        named = instance.layer_by_id[layer_id]
        reason = (
            f'layer {named.id} ("{named.name}") alone needs {bytes_text(need_bytes)} on each device at best; '
            f"a device has {bytes_text(instance.memory_bytes)}"
        )
    else:
        reason = (
            f"every layer fits alone, but no {instance.devices} devices of {bytes_text(instance.memory_bytes)} hold "
            "all stages with the microbatches they keep in flight"
        )
    return Infeasibility(reason, least_bytes)


def _largest_layer(problem: Problem) -> tuple[float, int]:
    """Returns the least memory, in bytes, and the id of the layer that needs most with one microbatch in flight."""
    options = problem.workload.options
    most_replicas = _most_replicas(problem)
    return max(
        (
            min(
                tmpc.activation_bytes + tmpc.fixed_bytes + tmpc.shared_bytes / d
                for d, of_variant in zip(most_replicas, options.tmpcs, strict=True)
                for tmpc in of_variant[v]
            ),
            layer_id,
        )
        for v, layer_id in enumerate(problem.workload.lattice.graph.layer_ids)
    )


def _most_replicas(problem: Problem) -> list[int]:
    """Returns for each variant the largest data-parallel degree that the devices allow; if none, its least degree."""
    cluster = problem.cluster
    found = []
    for variant, first, end in zip(
        problem.workload.options.variants, cluster.first_divisor, cluster.end_divisor, strict=True
    ):
        degrees = cluster.divisors[first:end]
        within = degrees[degrees * variant.degree <= cluster.devices]
        found.append(int(within[-1]) if within.size else variant.least_data_parallel_degree)
    return found


def least_memory_bytes(
    instance: Instance, problem: Problem, evaluations: Evaluations, on_progress: OnProgress
) -> float | None:
    """Returns the least M for which there is a plan. The search is that for time; the bottleneck is a stage's
    memory."""
    unbounded_s = ceiling_s(instance)
    # Each layer must fit with one microbatch in flight. All devices together must hold the replicas of every layer, and
    # what its replicas share out once.
    options = problem.workload.options
    shares = [
        min(
            variant.degree
            * (variant.least_data_parallel_degree * (tmpc.activation_bytes + tmpc.fixed_bytes) + tmpc.shared_bytes)
            for variant, of_variant in zip(options.variants, options.tmpcs, strict=True)
            for tmpc in of_variant[v]
        )
        for v in range(problem.workload.lattice.graph.size)
    ]
    lower = max(instance.memory_bytes, _largest_layer(problem)[0] * _BELOW, sum(shares) / instance.devices * _BELOW)
    bracket = Bracket(
        lower=lower, ceiling=max(ceiling_bytes(instance, instance.data_parallel_limit), lower) * (1.0 + 1e-9)
    )
    while not bracket.closed:
        if bracket.exhausted:
            return None
        memory_bytes = bracket.propose()
        cluster = problem.cluster._replace(memory_bytes=memory_bytes * (1.0 + MEMORY_TOLERANCE))
        with_memory = problem.with_cluster(cluster)
        outcome = evaluations.evaluate(with_memory, unbounded_s, on_progress=on_progress)
        if outcome.feasible:
            used = max(_least_stage_bytes(with_memory, stage) for stage in outcome.stages)
            bracket.record_feasible(memory_bytes, min(used, memory_bytes))
        else:
            bracket.record_infeasible(memory_bytes)
    return bracket.upper


def _least_stage_bytes(problem: Problem, traced: TracedStage) -> float:
    _, items = items_of(problem, traced)
    return float(sum(np.min(memory) for memory in np.split(items.memory, items.start[1:-1])))
