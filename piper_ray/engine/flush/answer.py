"""A solve with one d and one t for all stages, as ``solve`` is asked for it and answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

from piper_ray.cost.schedules import FlushSchedule
from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.flush.cluster_crew import ClusterBackend, ClusterCrew
from piper_ray.engine.flush.crew import Crew, ThreadCrew
from piper_ray.engine.flush.memo import TaskMemo
from piper_ray.engine.flush.records import FlushSolution
from piper_ray.engine.flush.solve import solve_flush
from piper_ray.engine.request import SolveRequest
from piper_ray.model.cores import usable_cores
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.passes import with_passes
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule
from piper_ray.model.solution import DegreeStats, Infeasibility, Solution, SolveStats
from piper_ray.model.step import StepTerms


def solve_under_flush(request: SolveRequest, schedule: Schedule) -> Solution:
    """The plan whose batch is fastest, one d and one t for all stages; value and bound are of a microbatch.

    Under a flush a batch is simulated; without one it takes N times what the slowest stage takes.

    Raises UsageError for a backend of one's own that such a search cannot use.
    """
    instance = instance_under(schedule, request.instance, request.note)
    part = request.stop.part()
    cluster = None if request.backend is None else request.backend.stats

    def answered(found: FlushSolution | None) -> Solution | None:
        if found is None:
            return None
        solution = as_solution(instance, schedule, request.step, found)
        return solution if cluster is None else replace(solution, stats=replace(solution.stats, cluster=cluster()))

    request.stop.offer(lambda: answered(part.answer()))
    with request.open_checkpoint(schedule, "searches of degrees") as checkpoint, _crew(request) as crew:
        found = solve_flush(
            instance,
            flush_schedule(schedule),
            step=request.step,
            restrictions=request.restrictions,
            options=request.options,
            stop=part,
            listener=request.listener,
            explain=True,
            crew=crew,
            memo=None if checkpoint is None else TaskMemo(checkpoint),
        )
        solution = answered(found)
    assert solution is not None
    return solution


@contextmanager
def _crew(request: SolveRequest) -> Iterator[Crew]:
    """Threads, or the workers of the caller's backend, which stays open.

    Raises UsageError for a backend that has neither.
    """
    backend = request.backend
    crew: ThreadCrew | ClusterCrew
    if backend is None or isinstance(backend, LocalBackend):
        threads = request.options.threads if backend is None else backend.threads
        crew = ThreadCrew(threads or usable_cores())
    elif isinstance(backend, ClusterBackend):
        backend.listen(request.listener)
        crew = ClusterCrew(backend)
    else:
        raise UsageError(f"the backend {backend!r} evaluates levels alone, and no calls: leave it out for such a solve")
    with closing(crew):
        yield crew


def instance_under(schedule: Schedule, instance: Instance, tell: Callable[[str], None]) -> Instance:
    """With the passes that the schedule asks for. Piper's knows passes of both kinds together only."""
    return instance if schedule == PAPERS_SCHEDULE else with_passes(instance, tell)


def flush_schedule(schedule: Schedule) -> FlushSchedule:
    """As the tables know it."""
    return FlushSchedule(schedule.name.value)


def as_solution(instance: Instance, schedule: Schedule, step: StepTerms, found: FlushSolution) -> Solution:
    """Of the kind that all solves have."""
    stats, layers, value_s = found.stats, len(instance.layers), found.time_per_sample_s
    optimizer_s = step.optimizer_s / instance.microbatches  # of every rank, whatever the plan
    return Solution(
        status=found.status,
        time_per_sample_s=None if value_s is None else value_s + optimizer_s,
        lower_bound_s=found.lower_bound_s + optimizer_s,
        plan=found.plan,
        stats=SolveStats(
            layers=layers,
            contracted_layers=layers,
            downsets=stats.downsets,
            levels=stats.levels,
            pairs=None,
            threads=stats.threads,
            lattice_s=stats.lattice_s,
            stage_costs_s=stats.stage_costs_s,
            search_s=stats.search_s,
            evaluations=(),
            degrees=DegreeStats(stats.tasks, stats.searched, stats.looked_through, stats.states),
        ),
        infeasibility=None if found.reason is None else Infeasibility(found.reason, found.least_memory_bytes),
        stopped_by=found.stopped_by,
        schedule=schedule,
        step=step,
    )
