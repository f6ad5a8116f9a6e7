"""A solve under a schedule whose ranks hold chunks of the model, as ``solve`` is asked for it and answers."""

from __future__ import annotations

import time
from collections.abc import Sequence

from piper_ray.cost.variants import Variant, layer_without_choice, stage_variants
from piper_ray.engine.backends.cores import usable_cores
from piper_ray.engine.chunks.candidates import Candidate
from piper_ray.engine.chunks.search import ChunkSearch
from piper_ray.engine.chunks.tables import ModelOrder
from piper_ray.engine.chunks.tasks import PlanSpace, list_tasks
from piper_ray.engine.request import SolveRequest
from piper_ray.model.constraints import AllDevices, FilledPipeline, SameDegrees, StageCount
from piper_ray.model.errors import UsageError
from piper_ray.model.events import Bounds, IncumbentFound
from piper_ray.model.instance import Instance
from piper_ray.model.options import Contract
from piper_ray.model.passes import with_passes
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.model.solution import DegreeStats, Infeasibility, Solution, SolveStats, Status

MOST_CHUNKS = 8
"""Of a rank, where nobody asks for more: runtimes seldom go further, as each chunk costs transfers and launches."""

_KNOWN = (SameDegrees, StageCount, AllDevices, FilledPipeline)


def most_chunks(given: Schedule | ScheduleName | str) -> int | None:
    """Of a rank, where a solve looks for their number; None where that is given, by the schedule's own rule too."""
    schedules = chunk_schedules(given)
    return max(schedule.v for schedule in schedules) if len(schedules) > 1 else None


def chunk_schedules(given: Schedule | ScheduleName | str) -> tuple[Schedule, ...]:
    """A schedule as it is; for a name those with every number of chunks that may pay."""
    if isinstance(given, Schedule):
        return (given,)
    usual = Schedule.of(given)
    if usual.name in (ScheduleName.INTERLEAVED, ScheduleName.LOOPED_BFS):
        return tuple(Schedule(usual.name, chunks) for chunks in range(1, MOST_CHUNKS + 1))
    return (usual,)


def solve_with_chunks(request: SolveRequest, schedules: Sequence[Schedule]) -> Solution:
    """A plan whose simulated batch takes little, one d and one t for all, and what is proved of every plan's batch.

    schedules: of one name, with the numbers of chunks that may be. A plan's stages are its chunks, front to back, p v
    of them; ``StageCount`` is of p, the ranks. Value and bound are of a microbatch: seconds of a batch over N.

    Raises UsageError for what such a search does not know: a backend, a checkpoint, blocks of operators, constraints.
    """
    _refuse_unknown(request, schedules[0].name.value)
    instance = with_passes(request.instance, request.note)
    started_s = time.perf_counter()
    variants = tuple(
        variant for variant in stage_variants(instance, request.restrictions) if variant.degree <= instance.devices
    )
    impossible = layer_without_choice(instance, variants)
    order = ModelOrder.of(instance)
    tasks = [] if impossible else list_tasks(instance, order, _space(request, instance, schedules, variants))
    tables_s = time.perf_counter() - started_s
    options = request.options
    deadline_s = None if options.time_limit_s is None else request.started_s + options.time_limit_s
    threads = options.threads or usable_cores()
    optimizer_s = request.step.optimizer_s  # of every rank, whatever the plan

    def tell(found: Candidate) -> None:
        value_s, lower_s = ((x + optimizer_s) / instance.microbatches for x in (found.batch_s, search.lower_s))
        bounds = Bounds(lower_s, value_s, time.perf_counter() - request.started_s)
        request.listener(IncumbentFound("search", value_s, found.task.shape.stages, found.task.devices, bounds))

    search = ChunkSearch(tasks, threads, options.gap, deadline_s, request.stop, tell)

    def solution() -> Solution:
        found, n = search.best, instance.microbatches
        lower_s, stopped_by = search.lower_s, search.stopped_by
        status = Status.FEASIBLE if found is not None else Status.UNKNOWN
        reason = None
        if found is not None and search.proved:
            status, stopped_by = Status.OPTIMAL, None
        if found is None and lower_s == float("inf"):
            status, reason = Status.INFEASIBLE, impossible.reason if impossible else "no plan fits"
        return Solution(
            status=status,
            time_per_sample_s=None if found is None else (found.batch_s + optimizer_s) / n,
            lower_bound_s=(lower_s + optimizer_s) / n,
            plan=None if found is None else found.plan(),
            stats=SolveStats(
                layers=len(instance.layers),
                contracted_layers=len(instance.layers),
                downsets=order.downsets or 0,
                levels=order.size + 1,
                pairs=None,
                threads=threads,
                lattice_s=tables_s,
                stage_costs_s=0.0,
                search_s=time.perf_counter() - started_s - tables_s,
                evaluations=(),
                degrees=DegreeStats(len(tasks), search.bounded, search.bounded, 0),
            ),
            infeasibility=None if reason is None else Infeasibility(reason, None),
            stopped_by=stopped_by,
            schedule=schedules[0] if found is None else found.task.shape.schedule,
            step=request.step,
        )

    request.stop.offer(solution)
    search.run()
    return solution()


def _refuse_unknown(request: SolveRequest, name: str) -> None:
    how = f"under schedule {name}"
    if request.backend is not None:
        raise UsageError(f"a cluster cannot solve {how} yet: leave out the backend (--address)")
    if request.options.resume is not None:
        raise UsageError(f"a solve {how} cannot be resumed yet: leave out resume")
    if request.options.contract is not Contract.SAFE:
        raise UsageError(f"operators cannot be merged {how} yet: leave out contract")
    unknown = [rule for rule in request.restrictions.plan_wide if not isinstance(rule, _KNOWN)]
    if unknown:
        raise UsageError(f"plans {how} cannot keep {', '.join(map(repr, unknown))} yet")


def _space(
    request: SolveRequest, instance: Instance, schedules: Sequence[Schedule], variants: Sequence[Variant]
) -> PlanSpace:
    restrictions = request.restrictions
    return PlanSpace(
        schedules,
        variants,
        restrictions.data_parallel_degrees(instance),
        ranks=restrictions.stage_count,
        all_devices=restrictions.all_devices,
        filled=restrictions.has(FilledPipeline),
        step=request.step,
    )
