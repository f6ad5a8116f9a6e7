"""Clusters whose nodes have faster links than those between them: solved once for each size of group.

What stages hand over goes over the network unless all of a plan lies in one node, so plans that do are sought by
themselves, on a cluster of that size with the node's link alone. All others are sought on all devices, where no plan
counts on a smaller group (``Cluster.levels``). Plans of one node mostly cannot be as fast, which is known beforehand.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from piper_ray.cost.tolerances import PROOF
from piper_ray.engine.request import SolveRequest
from piper_ray.engine.several import Solver, better, faster_than, in_time
from piper_ray.evaluate import evaluate
from piper_ray.model.events import PartBegun
from piper_ray.model.figures import plural
from piper_ray.model.instance import Instance
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import PAPERS_SCHEDULE
from piper_ray.model.solution import Solution, Status
from piper_ray.model.stop import Stop, StoppedBy, StopSearch


def least_s(instance: Instance) -> float:
    """No plan on these devices takes less per sample, under any schedule: their work alone."""
    work_s = [
        min((t * tmpc.time_per_sample_s for t, row in layer.tmpcs.items() for tmpc in row), default=0.0)
        for layer in instance.layers
    ]
    return sum(work_s) / instance.devices * (1.0 - PROOF)


def may_be_faster(instance: Instance, restrictions: Restrictions, value_s: float | None, gap: float) -> bool:
    """Whether plans of a smaller level may be, by more than the gap, than such a one of more devices (None: there is
    none)."""
    if restrictions.all_devices or not restrictions.data_parallel_degrees(instance):
        return False
    return value_s is None or least_s(instance) < value_s * (1.0 - max(gap, PROOF))


def solve_on_levels(request: SolveRequest, solve: Solver) -> Solution:
    """``solve``, for each level of links whose plans may be the best."""
    *smaller, whole = instances(request.instance)
    on_all = replace(request, instance=whole)
    if not smaller or request.restrictions.all_devices:
        return solve(on_all)

    def interrupted(found: Solution, others: Iterable[Instance]) -> Solution:
        return _as_placed(request.instance, among(found, others, StoppedBy.INTERRUPT))

    part: Stop[Solution] = request.stop.part()
    request.stop.offer(lambda: None if (known := part.answer()) is None else interrupted(known, smaller))
    found = solve(replace(on_all, stop=part))
    if found.status is Status.INFEASIBLE:
        return found
    # Of those left no more is known than their work; as a rule they are no better by more than the gap.
    left, reason = tuple(smaller), StoppedBy.GAP
    for instance in reversed(smaller):
        if request.stop.requested or found.stopped_by is StoppedBy.INTERRUPT:
            reason = StoppedBy.INTERRUPT
            break
        if not may_be_faster(instance, request.restrictions, found.time_per_sample_s, request.options.gap):
            continue
        request.stop.offer(partial(interrupted, found, left))
        request.listener(PartBegun(2, f"plans within {plural(instance.devices, 'device')}, on the faster link"))
        alone = faster_than(found, replace(request, instance=instance, options=replace(request.options, resume=None)))
        try:
            found = better(found, solve(replace(in_time(request, alone, 1), stop=request.stop.part())))
        except StopSearch as stop:
            reason = stop.reason
            break
        left = tuple(other for other in left if other is not instance)
    return _as_placed(request.instance, among(found, left, reason))


def _as_placed(instance: Instance, found: Solution) -> Solution:
    """With its plan's time in one node where it fits into one and was sought on all devices: as the referee has it."""
    if found.plan is None or found.time_per_sample_s is None or found.schedule != PAPERS_SCHEDULE:
        return found
    time_s = evaluate(instance, found.plan, schedule=PAPERS_SCHEDULE).time_per_sample_s
    if time_s >= found.time_per_sample_s:
        return found
    return replace(found, time_per_sample_s=time_s, lower_bound_s=min(found.lower_bound_s, time_s))


def instances(instance: Instance) -> tuple[Instance, ...]:
    """On each level of the cluster, the whole of it last."""
    levels = instance.cluster.levels()
    return tuple(instance if level is instance.cluster else instance.replace(cluster=level) for level in levels)


def among(found: Solution, others: Iterable[Instance], reason: StoppedBy) -> Solution:
    """What was found where of some others nothing is known but their work, for this reason."""
    lower_s = min((least_s(instance) for instance in others), default=float("inf"))
    if lower_s >= found.lower_bound_s:
        return found
    status = status_of(found.time_per_sample_s, lower_s)
    stopped_by = None if status is Status.OPTIMAL else found.stopped_by or reason
    return replace(found, lower_bound_s=lower_s, status=status, stopped_by=stopped_by)


def status_of(value_s: float | None, lower_s: float) -> Status:
    """Of a plan's time and a bound for all plans."""
    if value_s is None:
        return Status.INFEASIBLE if lower_s == float("inf") else Status.UNKNOWN
    return Status.OPTIMAL if lower_s >= value_s * (1.0 - PROOF) else Status.FEASIBLE
