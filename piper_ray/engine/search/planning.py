"""From the tables' stages to a plan: the layers of each stage and their TMPCs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from piper_ray.cost.stage import in_flight
from piper_ray.engine.evaluation.outcome import TracedStage
from piper_ray.engine.kernels.knapsack import TOO_HARD, least_cost
from piper_ray.engine.kernels.selection import stage_items
from piper_ray.engine.lattice.bits import members
from piper_ray.engine.lattice.contraction import Contraction
from piper_ray.engine.tables.problem import Problem
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan, Stage


def build_plan(instance: Instance, problem: Problem, contraction: Contraction, stages: Sequence[TracedStage]) -> Plan:
    """Runs each stage as fast as its memory allows; layers in file order."""
    position = {layer.id: index for index, layer in enumerate(instance.layers)}
    groups = contraction.members(instance)
    return Plan(tuple(_build_stage(problem, contraction, groups, position, stage) for stage in stages))


def _build_stage(
    problem: Problem,
    contraction: Contraction,
    groups: dict[int, tuple[int, ...]],
    position: dict[int, int],
    traced: TracedStage,
) -> Stage:
    graph, options = problem.workload.lattice.graph, problem.workload.options
    variant = options.variants[traced.variant]
    vertices, start, cost, memory = stage_items(
        problem.lattice.bits[traced.inner],
        problem.lattice.bits[traced.outer],
        problem.tables,
        traced.variant,
        traced.data_parallel_degree,
        in_flight(traced.later_sum, traced.data_parallel_degree),
    )
    choice = np.empty(vertices.size, np.int64)
    limit, budget_s = problem.cluster.memory_bytes, traced.budget_s
    best = least_cost(start, cost, memory, limit, np.inf, False, choice)
    if best == TOO_HARD:  # then the choice that the evaluation found will do
        best = least_cost(start, cost, memory, limit, budget_s, True, choice)
    if not 0.0 <= best < np.inf:
        raise AssertionError("a stage of the plan does not fit")

    tmpc_ids: dict[int, str] = {}
    for k, v in enumerate(vertices.tolist()):
        kept = graph.layer_ids[v]
        for layer_id in groups[kept]:
            if layer_id == kept:
                tmpc_ids[layer_id] = options.tmpcs[traced.variant][v][int(choice[k] - start[k])].id
            else:
                free = contraction.free_tmpc(variant.tmpcs[layer_id])
                assert free is not None, "contraction merges only layers that are free in this variant"
                tmpc_ids[layer_id] = free.id
    layers = tuple(sorted(tmpc_ids, key=position.__getitem__))
    return Stage(layers, traced.data_parallel_degree, variant.degree, {layer: tmpc_ids[layer] for layer in layers})


def chain_through(problem: Problem, stages: Sequence[TracedStage]) -> list[int]:
    """The vertices in an order that passes every downset between two stages of a plan, from the back."""
    bits = problem.lattice.bits
    return [v for stage in reversed(stages) for v in members(bits[stage.outer] & ~bits[stage.inner])]
