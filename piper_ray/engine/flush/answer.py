"""A solve with one d and one t for all stages, as ``solve`` is asked for it and answers."""

from __future__ import annotations

from piper_ray.cost.schedules import FlushSchedule
from piper_ray.engine.flush.records import FlushConstraints, FlushSolution
from piper_ray.engine.flush.solve import solve_flush
from piper_ray.engine.request import Request
from piper_ray.model.constraints import AllDevices, SameDegrees, StageCount
from piper_ray.model.errors import UsageError
from piper_ray.model.events import Bounds, IncumbentFound
from piper_ray.model.options import Contract
from piper_ray.model.passes import with_passes
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule
from piper_ray.model.solution import DegreeStats, Infeasibility, Solution, SolveStats

_KNOWN = (SameDegrees, StageCount, AllDevices)


def solve_under_flush(request: Request, schedule: Schedule) -> Solution:
    """The plan whose batch is fastest, one d and one t for all stages; value and bound are of a microbatch.

    Under a flush a batch is simulated; without one it takes N times what the slowest stage takes.

    Raises UsageError for what such a search does not know: a backend, a checkpoint, blocks of operators, constraints.
    """
    _refuse_unknown(request, schedule)
    instance = request.instance
    if schedule != PAPERS_SCHEDULE:  # which knows passes of both kinds together only
        instance = with_passes(instance)
        for note in instance.notes[len(request.instance.notes) :]:
            request.note(note)
    part = request.stop.part()
    request.stop.offer(lambda: None if (found := part.answer()) is None else _solution(request, schedule, found))
    found = solve_flush(
        instance,
        FlushSchedule(schedule.name.value),
        constraints=_constraints(request.restrictions),
        restrictions=request.restrictions,
        options=request.options,
        stop=part,
    )
    solution = _solution(request, schedule, found)
    if solution.plan is not None and solution.time_per_sample_s is not None:
        bounds = Bounds(solution.lower_bound_s, solution.time_per_sample_s, found.stats.tables_s + found.stats.search_s)
        stages, devices = len(solution.plan.stages), solution.plan.devices
        request.listener(IncumbentFound("search", solution.time_per_sample_s, stages, devices, bounds))
    return solution


def _refuse_unknown(request: Request, schedule: Schedule) -> None:
    name = schedule.name.value
    how = f"with one d and one t for all stages (schedule {name})"
    if request.backend is not None:
        raise UsageError(f"a cluster cannot solve {how} yet: leave out the backend (--address)")
    if request.options.resume is not None:
        raise UsageError(f"a solve {how} cannot be resumed yet: leave out resume")
    if request.options.contract is not Contract.SAFE:
        raise UsageError(f"operators cannot be merged {how} yet: leave out contract")
    unknown = [rule for rule in request.restrictions.plan_wide if not isinstance(rule, _KNOWN)]
    if unknown:
        raise UsageError(f"plans {how} cannot keep {', '.join(map(repr, unknown))} yet")


def _constraints(restrictions: Restrictions) -> FlushConstraints:
    counts = [rule.stages for rule in restrictions.plan_wide if isinstance(rule, StageCount)]
    return FlushConstraints(
        stages=counts[0] if counts else None,
        all_devices=any(isinstance(rule, AllDevices) for rule in restrictions.plan_wide),
    )


def _solution(request: Request, schedule: Schedule, found: FlushSolution) -> Solution:
    stats = found.stats
    return Solution(
        status=found.status,
        time_per_sample_s=found.time_per_sample_s,
        lower_bound_s=found.lower_bound_s,
        plan=found.plan,
        stats=SolveStats(
            layers=len(request.instance.layers),
            contracted_layers=len(request.instance.layers),
            downsets=stats.downsets,
            levels=stats.levels,
            pairs=None,
            threads=stats.threads,
            lattice_s=stats.tables_s,
            stage_costs_s=0.0,
            search_s=stats.search_s,
            evaluations=(),
            degrees=DegreeStats(stats.tasks, stats.searched, stats.looked_through, stats.states),
        ),
        infeasibility=None if found.reason is None else Infeasibility(found.reason, None),
        stopped_by=found.stopped_by,
        schedule=schedule,
    )
