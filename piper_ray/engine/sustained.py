"""Asynchronous plans whose rate round-robin replicas sustain, each stage with as many in flight as that takes.

The paper's y = ceil(s / d) is not enough where stages differ in d. A plan of the usual search that has the memory for
more keeps its value, and its proof: what sustains keeps no less than the rule, so plans that do are among those of the
usual search. Where it has not, plans are sought that leave some memory free, and among those with one d and one t for
all stages, whose rate the rule sustains. The bound stays that of the usual search; the gap says what may be lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from piper_ray.cost.tolerances import MEMORY_TOLERANCE
from piper_ray.engine.request import SolveRequest
from piper_ray.model.constraints import Constraint, SameDegrees
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import PAPERS_SCHEDULE
from piper_ray.model.solution import Solution, Status
from piper_ray.model.stop import StopSearch
from piper_ray.simulate.assemble import most_bytes, sustaining_in_flight
from piper_ray.simulate.run import simulate

Solver = Callable[[SolveRequest], Solution]

_TRIALS = 10
"""Solves with less memory at most."""

_STEP = 0.01
"""Share of the memory by which each trial leaves more free at least."""


@dataclass(frozen=True)
class _Kept:
    """plan: the plan with what it keeps in flight; None where memory does not suffice, missing_bytes on some device."""

    plan: Plan | None
    missing_bytes: float = 0.0


def solve_sustained(request: SolveRequest, solve: Solver) -> Solution:
    """The best plan found that sustains its rate. request: without the constraint."""
    first = solve(replace(request, stop=request.stop.part()))
    if first.plan is None:
        return first
    kept = _kept(request.instance, first.plan)
    if kept.plan is not None:
        return replace(first, plan=kept.plan)
    without = replace(first, status=Status.UNKNOWN, plan=None, time_per_sample_s=None)
    request.stop.offer(lambda: without)
    best = _best_of_others(request, solve, kept.missing_bytes)
    if best is None:
        return without
    lower_s = min(first.lower_bound_s, best.time_per_sample_s or 0.0)
    return replace(best, status=Status.FEASIBLE, lower_bound_s=lower_s, stats=first.stats, stopped_by=first.stopped_by)


def _kept(instance: Instance, plan: Plan) -> _Kept:
    """By analysis, and proved by simulation."""
    in_flight = sustaining_in_flight(instance, plan)
    if in_flight is None:
        return _Kept(None, _STEP * instance.memory_bytes)
    kept = replace(plan, in_flight=in_flight)
    missing_bytes = most_bytes(instance, kept) - instance.memory_bytes
    if missing_bytes > MEMORY_TOLERANCE * instance.memory_bytes:
        return _Kept(None, missing_bytes)
    return _Kept(kept if simulate(instance, kept, PAPERS_SCHEDULE).keeps_promise else None)


def _best_of_others(request: SolveRequest, solve: Solver, missing_bytes: float) -> Solution | None:
    """Of plans that leave ever more memory free the first that sustains its rate, or one with one d and one t."""
    instance = request.instance
    best = None
    if request.backend is None:  # which such a solve does not know
        best = _tried(request, solve, instance.memory_bytes, SameDegrees())[0]
    limit_bytes = instance.memory_bytes
    for _ in range(_TRIALS):
        limit_bytes -= max(_STEP * instance.memory_bytes, missing_bytes)
        if limit_bytes <= 0.0:
            break
        found, missing_bytes = _tried(request, solve, limit_bytes)
        if found is None or not _faster(found, best):
            break
        if missing_bytes == 0.0:
            return found
    return best


def _tried(
    request: SolveRequest, solve: Solver, memory_bytes: float, *rules: Constraint
) -> tuple[Solution | None, float]:
    """A solve with so much memory; None: no plan. And what its plan lacks of all memory to sustain its rate."""
    limit_s = request.options.time_limit_s
    if limit_s is not None and time.perf_counter() - request.started_s >= limit_s:
        return None, 0.0
    options = request.options
    if options.resume is not None:  # a checkpoint of its own
        options = replace(options, resume=f"{options.resume}/{memory_bytes:.0f}{'-alike' if rules else ''}")
    changed = replace(
        request,
        options=options,
        instance=request.instance.replace(memory_bytes=memory_bytes),
        restrictions=request.restrictions.adding(*rules),
        stop=request.stop.part(),
    )
    try:
        found = solve(changed)
    except StopSearch:
        return None, 0.0
    if found.plan is None:
        return None, 0.0
    kept = _kept(request.instance, found.plan)
    return (found, kept.missing_bytes) if kept.plan is None else (replace(found, plan=kept.plan), 0.0)


def _faster(one: Solution, other: Solution | None) -> bool:
    if other is None or other.time_per_sample_s is None or one.time_per_sample_s is None:
        return True
    return one.time_per_sample_s < other.time_per_sample_s
