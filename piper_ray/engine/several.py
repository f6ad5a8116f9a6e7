"""One answer out of several solves, one after the other: of parts of what a plan may be."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import astuple, replace

from piper_ray.cost.tolerances import PROOF
from piper_ray.engine.request import SolveRequest
from piper_ray.model.solution import DegreeStats, Solution, Status
from piper_ray.model.stop import StoppedBy

Solver = Callable[[SolveRequest], Solution]

_A_MOMENT_S = 1e-3


def faster_than(found: Solution, part: SolveRequest) -> SolveRequest:
    """Whose plans are of interest only if they are as fast."""
    known_s = [s for s in (found.time_per_sample_s, part.options.within_s) if s is not None]
    return replace(part, options=replace(part.options, within_s=min(known_s, default=None)))


def in_time(request: SolveRequest, part: SolveRequest, parts_left: int) -> SolveRequest:
    """With its share of the time that is left."""
    limit_s, now_s = request.options.time_limit_s, time.perf_counter()
    if limit_s is None:
        return replace(part, started_s=now_s)
    left_s = max(_A_MOMENT_S, (limit_s - (now_s - request.started_s)) / parts_left)
    return replace(part, options=replace(part.options, time_limit_s=left_s), started_s=now_s)


def answer_of(
    request: SolveRequest, part: SolveRequest, solve: Solver, so_far: Callable[[Solution], Solution]
) -> Solution:
    """The answer to a part; at any moment before it ``so_far`` of what that has is offered."""
    stop = request.stop.part()
    request.stop.offer(lambda: None if (found := stop.answer()) is None else so_far(found))
    return solve(replace(part, stop=stop))


def unfinished(found: Solution) -> Solution:
    """What is said of it while there are solves that were not begun."""
    status = Status.UNKNOWN if found.plan is None else Status.FEASIBLE
    return replace(found, status=status, lower_bound_s=0.0, infeasibility=None)


def better(first: Solution, second: Solution) -> Solution:
    """Of two solves the better plan, with what both have proved."""
    found = (first, second)
    stats = replace(
        second.stats,
        lattice_s=first.stats.lattice_s + second.stats.lattice_s,
        stage_costs_s=first.stats.stage_costs_s + second.stats.stage_costs_s,
        search_s=first.stats.search_s + second.stats.search_s,
        evaluations=(*first.stats.evaluations, *second.stats.evaluations),
        degrees=_both(first.stats.degrees, second.stats.degrees),
    )
    if all(one.status is Status.INFEASIBLE for one in found):
        return replace(min(found, key=_least_memory_bytes), stats=stats)
    lower_s = min(one.lower_bound_s for one in found)
    early = [one.stopped_by for one in found if one.stopped_by is not None]
    stopped_by = next((reason for reason in early if reason is not StoppedBy.TOO_SLOW), early[0] if early else None)
    with_plan = [(one.time_per_sample_s, one) for one in found if one.time_per_sample_s is not None]
    if not with_plan:
        unknown = next(one for one in found if one.status is not Status.INFEASIBLE)
        return replace(unknown, lower_bound_s=lower_s, stats=stats, stopped_by=stopped_by)
    value_s, best = min(with_plan, key=lambda x: x[0])
    ended = all(one.status in (Status.OPTIMAL, Status.INFEASIBLE) for one in found)
    proved = ended or lower_s >= value_s * (1.0 - PROOF)
    return replace(
        best,
        status=Status.OPTIMAL if proved else Status.FEASIBLE,
        lower_bound_s=min(lower_s, value_s),
        stats=stats,
        stopped_by=None if proved else stopped_by,
    )


def _both(first: DegreeStats | None, second: DegreeStats | None) -> DegreeStats | None:
    if first is None or second is None:
        return second if first is None else first
    return DegreeStats(*(one + other for one, other in zip(astuple(first), astuple(second), strict=True)))


def _least_memory_bytes(solution: Solution) -> float:
    found = None if solution.infeasibility is None else solution.infeasibility.least_memory_bytes
    return float("inf") if found is None else found
