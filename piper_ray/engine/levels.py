"""Clusters whose nodes have faster links than those between them: solved once for each size of group.

What stages hand over goes over the network unless all of a plan lies in one node, so plans that do are sought by
themselves, on a cluster of that size with the node's link alone. All others are sought on all devices, where no plan
counts on a smaller group (``Cluster.levels``). Plans of one node mostly cannot be as fast, which is known beforehand.
"""

from __future__ import annotations

from dataclasses import replace

from piper_ray.cost.plan import cost_of
from piper_ray.cost.tolerances import PROOF
from piper_ray.engine.request import SolveRequest
from piper_ray.engine.subproblems import Solver, SubProblem, best_of_levels
from piper_ray.model.figures import plural
from piper_ray.model.instance import Instance
from piper_ray.model.schedule import PAPERS_SCHEDULE
from piper_ray.model.solution import Solution
from piper_ray.model.stop import Stop


def least_s(instance: Instance) -> float:
    """No plan on these devices takes less per sample, under any schedule: their work alone."""
    work_s = [
        min((t * tmpc.time_per_sample_s for t, row in layer.tmpcs.items() for tmpc in row), default=0.0)
        for layer in instance.layers
    ]
    return sum(work_s) / instance.devices * (1.0 - PROOF)


def solve_on_levels(request: SolveRequest, solve: Solver) -> Solution:
    """``solve``, for each level of links whose plans may be the best."""
    *smaller, whole = instances(request.instance)
    on_all, restrictions = replace(request, instance=whole), request.restrictions
    if not smaller or restrictions.all_devices:
        return solve(on_all)
    parts = [SubProblem(least_s(whole), on_all, "")]
    for instance in reversed(smaller):
        if restrictions.data_parallel_degrees(instance):
            name = f"plans within {plural(instance.devices, 'device')}, on the faster link"
            parts.append(SubProblem(least_s(instance), replace(request, instance=instance), name))
    part: Stop[Solution] = request.stop.part()
    request.stop.offer(lambda: None if (found := part.answer()) is None else _as_placed(request.instance, found))
    return _as_placed(request.instance, best_of_levels(replace(request, stop=part), parts, solve))


def _as_placed(instance: Instance, found: Solution) -> Solution:
    """With its plan's time in one node where it fits into one and was sought on all devices."""
    if found.plan is None or found.time_per_sample_s is None or found.schedule != PAPERS_SCHEDULE:
        return found
    time_s = cost_of(instance, found.plan).sample_s
    if time_s >= found.time_per_sample_s:
        return found
    return replace(found, time_per_sample_s=time_s, lower_bound_s=min(found.lower_bound_s, time_s))


def instances(instance: Instance) -> tuple[Instance, ...]:
    """On each level of the cluster, the whole of it last."""
    levels = instance.cluster.levels()
    return tuple(instance if level is instance.cluster else instance.replace(cluster=level) for level in levels)
