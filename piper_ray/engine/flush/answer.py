"""A solve with one d and one t for all stages, as ``solve`` is asked for it and answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

from piper_ray.cost.schedules import FlushSchedule
from piper_ray.engine.backends.calls import TakesCalls, ThreadWorkers, Workers
from piper_ray.engine.flush.memo import TaskMemo
from piper_ray.engine.flush.solve import solve_flush
from piper_ray.engine.request import SolveRequest
from piper_ray.model.cores import usable_cores
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.passes import with_passes
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule
from piper_ray.model.solution import Solution


def solve_under_flush(request: SolveRequest, schedule: Schedule) -> Solution:
    """The plan whose batch is fastest, one d and one t for all stages; value and bound are of a microbatch.

    Under a flush a batch is simulated; without one it takes N times what the slowest stage takes.

    Raises UsageError for a backend of one's own that such a search cannot use.
    """
    instance = instance_under(schedule, request.instance, request.note)
    part = request.stop.part()
    cluster = None if request.backend is None else request.backend.stats

    def with_cluster(found: Solution) -> Solution:
        return found if cluster is None else replace(found, stats=replace(found.stats, cluster=cluster()))

    request.stop.offer(lambda: None if (found := part.answer()) is None else with_cluster(found))
    with (
        request.open_checkpoint(schedule, kept="searches of degrees") as checkpoint,
        _open_workers(request) as workers,
    ):
        return with_cluster(
            solve_flush(
                instance,
                flush_schedule(schedule),
                step=request.step,
                restrictions=request.restrictions,
                options=request.options,
                stop=part,
                listener=request.listener,
                explain=True,
                workers=workers,
                memo=None if checkpoint is None else TaskMemo(checkpoint),
            )
        )


@contextmanager
def _open_workers(request: SolveRequest) -> Iterator[Workers]:
    """Threads, or those of the caller's backend, which stays open.

    Raises UsageError for a backend that takes no calls.
    """
    backend = request.backend
    if backend is None:
        workers: Workers = ThreadWorkers(request.options.threads or usable_cores())
    elif isinstance(backend, TakesCalls):
        backend.listen(request.listener)
        workers = backend.open_workers()
    else:
        raise UsageError(f"the backend {backend!r} evaluates levels alone, and no calls: leave it out for such a solve")
    with closing(workers):
        yield workers


def instance_under(schedule: Schedule, instance: Instance, tell: Callable[[str], None]) -> Instance:
    """With the passes that the schedule asks for. Piper's knows passes of both kinds together only."""
    return instance if schedule == PAPERS_SCHEDULE else with_passes(instance, tell)


def flush_schedule(schedule: Schedule) -> FlushSchedule:
    """As the tables know it."""
    return FlushSchedule(schedule.name.value)
