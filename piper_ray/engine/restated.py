"""Constraints on a plan as a whole that are kept by solving another problem than the one asked."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from piper_ray.cost.tolerances import PROOF
from piper_ray.engine.request import SolveRequest
from piper_ray.engine.sustained import solve_sustained
from piper_ray.model.constraints import KeepOrder, Recompute, SustainedRate
from piper_ray.model.errors import UsageError
from piper_ray.model.in_order import in_order
from piper_ray.model.options import Contract
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule
from piper_ray.model.solution import Solution, Status
from piper_ray.model.stop import StoppedBy

Solver = Callable[[SolveRequest], Solution]

_A_MOMENT_S = 1e-3


def solve_restated(request: SolveRequest, schedule: Schedule, solve: Solver) -> Solution:
    """``solve``, also for constraints that it does not know: ``SustainedRate``, ``KeepOrder``, one-for-all.

    Raises UsageError where they cannot be kept: a rate under a schedule that drains, or an order of blocks.
    """
    restrictions = request.restrictions
    if restrictions.has(SustainedRate):
        if schedule != PAPERS_SCHEDULE:
            raise UsageError(f"only 2bw has a rate to sustain; {schedule.name.value} does not go on for ever")
        by_rule = replace(request, restrictions=restrictions.without(SustainedRate))
        return solve_sustained(by_rule, lambda one: solve_restated(one, schedule, solve))
    if restrictions.has(KeepOrder):
        chain = replace(request, instance=in_order(request.instance), restrictions=restrictions.without(KeepOrder))
        return _said(request, chain, lambda one: solve_restated(one, schedule, solve), _keeping_order)
    if restrictions.recompute is Recompute.ONE_FOR_ALL:
        return _one_for_all(request, solve)
    if restrictions.recompute is Recompute.FIRST_K and request.options.contract is not Contract.SAFE:
        raise UsageError("blocks of operators have no first k layers to recompute: leave out contract")
    return solve(request)


def _said(request: SolveRequest, changed: SolveRequest, solve: Solver, say: Callable[[Solution], Solution]) -> Solution:
    """The answer to ``changed`` in the words of ``request``, at the end and at any moment before it."""
    part = request.stop.part()
    request.stop.offer(lambda: None if (found := part.answer()) is None else say(found))
    return say(solve(replace(changed, stop=part)))


def _keeping_order(solution: Solution) -> Solution:
    plan = solution.plan
    return solution if plan is None else replace(solution, plan=replace(plan, keeps_order=True))


def _one_for_all(request: SolveRequest, solve: Solver) -> Solution:
    """The better of both settings. Until the second is begun nothing is known of it."""
    if request.options.resume is not None:
        raise UsageError("recomputation one-for-all takes two solves, which one folder cannot keep: leave out resume")
    never, always = (
        replace(request, restrictions=request.restrictions.with_recompute(rule))
        for rule in (Recompute.NEVER, Recompute.ALWAYS)
    )
    first = _said(request, never, solve, lambda one: one)
    if first.stopped_by is StoppedBy.INTERRUPT:
        return _better(first, None)
    limit_s = request.options.time_limit_s
    if limit_s is not None:
        left_s = max(_A_MOMENT_S, limit_s - (time.perf_counter() - request.started_s))
        now_s = time.perf_counter()
        always = replace(always, options=replace(always.options, time_limit_s=left_s), started_s=now_s)
    return _said(request, always, solve, lambda second: _better(first, second))


def _better(first: Solution, second: Solution | None) -> Solution:
    """Of two solves the better plan, with what both have proved. second: None if it was not begun."""
    if second is None:
        status = Status.UNKNOWN if first.plan is None else Status.FEASIBLE
        return replace(first, status=status, lower_bound_s=0.0, infeasibility=None)
    found = (first, second)
    stats = replace(
        second.stats,
        lattice_s=first.stats.lattice_s + second.stats.lattice_s,
        stage_costs_s=first.stats.stage_costs_s + second.stats.stage_costs_s,
        search_s=first.stats.search_s + second.stats.search_s,
        evaluations=(*first.stats.evaluations, *second.stats.evaluations),
    )
    if all(one.status is Status.INFEASIBLE for one in found):
        return replace(min(found, key=_least_memory_bytes), stats=stats)
    lower_s = min(one.lower_bound_s for one in found)
    stopped_by = first.stopped_by or second.stopped_by
    with_plan = [(one.time_per_sample_s, one) for one in found if one.time_per_sample_s is not None]
    if not with_plan:
        unknown = next(one for one in found if one.status is not Status.INFEASIBLE)
        return replace(unknown, lower_bound_s=lower_s, stats=stats, stopped_by=stopped_by)
    value_s, best = min(with_plan, key=lambda x: x[0])
    proved = lower_s >= value_s * (1.0 - PROOF)
    return replace(
        best,
        status=Status.OPTIMAL if proved else Status.FEASIBLE,
        lower_bound_s=min(lower_s, value_s),
        stats=stats,
        stopped_by=stopped_by,
    )


def _least_memory_bytes(solution: Solution) -> float:
    found = None if solution.infeasibility is None else solution.infeasibility.least_memory_bytes
    return float("inf") if found is None else found
