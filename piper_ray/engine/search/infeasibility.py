"""Explains why an instance has no plan, and finds how much memory would suffice."""

from __future__ import annotations

import numpy as np

from piper_ray.cost.bounds import ceiling_bytes, ceiling_s
from piper_ray.cost.tolerances import MEMORY_TOLERANCE
from piper_ray.engine.evaluation.backend import OnProgress
from piper_ray.engine.evaluation.evaluations import Evaluations
from piper_ray.engine.evaluation.outcome import TracedStage
from piper_ray.engine.search.bracket import Bracket
from piper_ray.engine.search.planning import items_of
from piper_ray.engine.tables.problem import Problem
from piper_ray.model.figures import bytes_text
from piper_ray.model.instance import Instance
from piper_ray.model.solution import Infeasibility

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
