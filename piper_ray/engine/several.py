"""One answer out of several solves, one after the other: of parts of what a plan may be."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from typing import NamedTuple

from piper_ray.cost.tolerances import PROOF
from piper_ray.engine.request import SolveRequest
from piper_ray.model.errors import UsageError
from piper_ray.model.events import PartBegun
from piper_ray.model.solution import DegreeStats, Solution, Status
from piper_ray.model.stop import StoppedBy

Solver = Callable[[SolveRequest], Solution]

_A_MOMENT_S = 1e-3


class Part(NamedTuple):
    """One of several solves. least_s: no plan of it takes less. name: which plans these are, in words."""

    least_s: float
    request: SolveRequest
    name: str


def best_of(request: SolveRequest, parts: Sequence[Part], solve: Solver, what: str) -> Solution:
    """The best answer of several solves, one after the other, the most promising first. what: asks for them, in words.

    Until all have been begun nothing is known of what the others would find. Each but the first is over once none of
    its plans can be better than the best one, and is not begun where its bound says so.
    """
    if len(parts) > 1 and request.options.resume is not None:
        raise UsageError(f"{what} takes {len(parts)} solves, which one folder cannot keep: leave out resume")
    found: Solution | None = None
    left_s = math.inf
    for index, (least_s, part, name) in enumerate(parts):
        so_far = found
        others = sum(not _is_beyond(other_s, request, so_far) for other_s, _, _ in parts[index + 1 :])
        if so_far is not None and _is_beyond(least_s, request, so_far):
            left_s = min(left_s, least_s)
            continue

        def answered(one: Solution, so_far: Solution | None = so_far, last: bool = others == 0) -> Solution:
            together = one if so_far is None else better(so_far, one)
            return together if last else unfinished(together)

        if len(parts) > 1:
            request.listener(PartBegun(index + 1, f"{index + 1} of {len(parts)}, {what}: {name}"))
        timed = in_time(request, part, min(2, others + 1))
        answer = answer_of(request, timed if found is None else faster_than(found, timed), solve, answered)
        found = answer if found is None else better(found, answer)
        if answer.stopped_by is StoppedBy.INTERRUPT and others:
            return unfinished(found)
    assert found is not None
    if found.time_per_sample_s is not None or left_s == math.inf:
        return found
    # Nothing was found, and what was not begun has no plan that is of interest.
    lower_s = left_s if found.status is Status.INFEASIBLE else min(found.lower_bound_s, left_s)
    stopped_by = StoppedBy.TOO_SLOW if found.status is Status.INFEASIBLE else found.stopped_by
    return replace(found, status=Status.UNKNOWN, lower_bound_s=lower_s, infeasibility=None, stopped_by=stopped_by)


def _is_beyond(least_s: float, request: SolveRequest, found: Solution | None) -> bool:
    """Whether no plan of a part is as fast as is known or asked. Where there is none at all, and none of others so far,
    the part is begun, to tell why."""
    if least_s == math.inf:
        return found is not None and found.status is not Status.INFEASIBLE
    known_s = None if found is None else found.time_per_sample_s
    within_s = request.options.within_s
    return (known_s is not None and least_s >= known_s) or (within_s is not None and least_s > within_s)


def faster_than(found: Solution, part: SolveRequest) -> SolveRequest:
    """Whose plans are of interest only if they are as fast."""
    known_s = [s for s in (found.time_per_sample_s, part.options.within_s) if s is not None]
    return replace(part, options=replace(part.options, within_s=min(known_s, default=None)))


def in_time(request: SolveRequest, part: SolveRequest, parts_left: int) -> SolveRequest:
    """With its share of the time that is left, as if there were so many."""
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
