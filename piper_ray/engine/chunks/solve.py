"""A solve under a schedule whose ranks hold chunks of the model, as it is asked for and answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from piper_ray.cost.bounds import ceiling_bytes
from piper_ray.engine.chunks.candidates import Candidate, Candidates, all_plans, walk_bounds
from piper_ray.engine.chunks.nodes import TurnMemo
from piper_ray.engine.chunks.search import ChunkSearch, WarmStart
from piper_ray.engine.chunks.tasks import ChunkProblem, Task, TaskKey
from piper_ray.engine.kernels.chunk_program import ChunkProgram
from piper_ray.engine.ledger import NO_PLAN_FITS, Ledger, stats_of_nothing
from piper_ray.engine.request import SolveRequest, Sought
from piper_ray.model.constraints import FilledPipeline, PipelinedChunks
from piper_ray.model.figures import plural, size_text
from piper_ray.model.instance import Instance
from piper_ray.model.schedule import Schedule
from piper_ray.model.solution import DegreeStats, Infeasibility, Solution, SolveStats, Status


def solve_with_chunks(request: SolveRequest, schedules: Sequence[Schedule]) -> Solution:
    """A plan whose simulated batch takes little time, with one d and one t for all stages, and a bound on every plan's
    batch.

    schedules: of one name, with the possible numbers of chunks. A plan's stages are its chunks, front to back, p v of
    them; ``StageCount`` counts the p ranks. Value and bound are for a microbatch: seconds of a batch over N.

    Raises UsageError for constraints that such a search does not support, and for a backend that takes no calls.
    """
    kept, key = request.kept, _key_of(request)
    if kept is None:
        return ChunkSeries(request, schedules).solve(request, explained=True)
    if key not in kept.searches:
        kept.searches[key] = ChunkSeries(request, schedules)
    series: ChunkSeries = kept.searches[key]
    return series.solve(request, explained=True)


def _key_of(request: SolveRequest) -> object:
    """As in ``KeptSearches``."""
    return request.instance.cluster, request.restrictions


class ChunkSeries:
    """Solves one workload on several numbers of devices: the solves share the order of layers, and the bound and the
    best plan of each (d, t, p, v).

    first: the solve on the most devices. preparation_s: how long it took to make what the solves share, from the
    request on. Raises UsageError for constraints that such a search does not support.
    """

    def __init__(self, first: SolveRequest, schedules: Sequence[Schedule]) -> None:
        how = f"under schedule {schedules[0].name.value}"
        first.restrictions.require_same_degrees(how, FilledPipeline, PipelinedChunks)
        self._problem = ChunkProblem.of(first.instance, first.restrictions, schedules, first.step, first.note)
        known = None if first.kept is None else first.kept.known.get(_key_of(first))
        self._known = WarmStart(known or {})
        self._last: ChunkSearch | None = None
        self.preparation_s = self._problem.tables_s

    @property
    def proved_s(self) -> Mapping[TaskKey, float]:
        """The bound of each (d, t, p, v) so far."""
        return self._known.proved_s

    def solve(self, request: SolveRequest, *, explained: bool = False) -> Solution:
        """Solves on as many devices as the request has; where searches are kept, the last one continues. explained: if
        there is no plan, the answer has the reason and the memory that would suffice."""
        problem, limits, last = self._problem, request.limits, self._last
        ledger: Ledger[Candidate] = request.ledger(problem.instance.microbatches) if last is None else last.ledger
        instance = problem.on(request.instance.devices)

        def answer() -> Solution:
            found = ledger.answer(
                Candidate.plan,
                lambda found: problem.schedules[0] if found is None else found.task.shape.schedule,
                _stats(problem, search),
                request.step,
                problem.impossible or NO_PLAN_FITS,
            )
            return request.with_cluster(found)

        with (
            request.open_checkpoint(*problem.schedules, kept="turns of a search") as checkpoint,
            request.open_workers() as workers,
        ):
            memo = None if checkpoint is None else TurnMemo(checkpoint)
            if last is None:
                seeks = Sought.BOTH if request.kept is None else request.kept.seeks
                search = ChunkSearch(problem.tasks(instance), workers, ledger, self._known, memo, seeks)
            else:
                search, last.workers = last, workers
                ledger.go_on(limits)
            request.stop.offer(answer)
            ledger.run(search)
        if request.kept is not None:
            search.forget_done()
            self._last = search
        self._known = search.learnt
        found = answer()
        if explained and found.status is Status.INFEASIBLE:
            with suppress(KeyboardInterrupt):  # that there is no plan is proved all the same
                why = problem.impossible or explain(problem, instance, lambda: limits.reached is not None)
                return replace(found, infeasibility=why)
        return found


def _stats(problem: ChunkProblem, search: ChunkSearch) -> SolveStats:
    return replace(
        stats_of_nothing(problem.instance, len(problem.instance.layers)),
        downsets=problem.order.downsets or 0,
        levels=problem.order.size + 1,
        threads=search.workers.width,
        lattice_s=problem.tables_s,
        search_s=search.seconds,
        degrees=DegreeStats(len(search.tasks), search.bounded, search.bounded, 0, search.ledger.passes),
    )


_STEPS = 1_000_000
"""The most layers placed, over all tasks: if this is enough for all of them, the least memory is known."""

_FEW_LAYERS = 24
"""Models with more layers are not tried."""

_TRIED = 8
"""The number of tasks of larger models that are tried with more memory: those whose ranks hold the least on average."""

_NEAR = 1.001


def explain(problem: ChunkProblem, instance: Instance, ends: Callable[[], bool]) -> Infeasibility:
    """Explains a proof that there is no plan, where every layer may run something. instance: the problem on other
    devices. ends: whether to stop."""
    name, layers, restrictions = problem.schedules[0].name.value, len(instance.layers), problem.restrictions
    chunks = min(schedule.v for schedule in problem.schedules)
    if chunks > layers:
        return Infeasibility(
            f"{name} with {plural(chunks, 'chunk')} on each rank cuts a model into {chunks:,} stages at least, none of "
            f"them empty; this one has {plural(layers, 'layer')}",
            None,
        )
    every = "all " if restrictions.all_devices else ""
    ranks = "" if restrictions.stage_count is None else f" on {plural(restrictions.stage_count, 'rank')}"
    on = f"{every}{instance.devices:,} devices with {instance.microbatches:,} microbatches"
    most_bytes = instance.memory_bytes + ceiling_bytes(instance, instance.microbatches)
    tasks = problem.tasks(instance.replace(memory_bytes=most_bytes))
    if not tasks:
        return Infeasibility(f"no plan{ranks} runs {name} on {on}, whatever the memory", None)
    on += f" and {size_text(instance.memory_bytes)} on each"
    least_bytes = _least_bytes(tasks, ends) if layers <= _FEW_LAYERS else None
    enough = ""
    if least_bytes is None:
        enough_bytes = _enough_bytes(tasks, instance.memory_bytes, ends)
        enough = "" if enough_bytes is None else f"; {size_text(enough_bytes)} would do, perhaps less"
    return Infeasibility(f"no plan{ranks} fits under {name} on {on}{enough}", least_bytes)


def _least_bytes(tasks: Sequence[Task], ends: Callable[[], bool]) -> float | None:
    """The least memory with which there is a plan; None if there are too many plans to enumerate."""
    least_bytes, control = np.inf, np.array([np.inf, 0.0])
    for task in _by_bytes(tasks):
        program = task.shape.program()
        if program is None:
            continue
        bounds = walk_bounds(task, program)
        found = all_plans(task, program, bounds, _STEPS, np.inf, control, memory_bytes=least_bytes, by_bytes=True)
        if found is None or found.walk.share < 1.0 or ends():
            return None
        least_bytes = min(least_bytes, found.walk.value)
    return least_bytes if np.isfinite(least_bytes) else None


def _enough_bytes(tasks: Sequence[Task], memory_bytes: float, ends: Callable[[], bool]) -> float | None:
    """A memory, more than ``memory_bytes``, with which a quick plan is found."""
    tried = [(task, program) for task in _by_bytes(tasks)[:_TRIED] if (program := task.shape.program()) is not None]
    most_bytes = high = tasks[0].memory_bytes
    low = memory_bytes
    while high > _NEAR * low:
        if ends():
            return None
        middle = min((low * high) ** 0.5 if low > 0.0 else high / 2.0, high)
        fits = any(_fits(task, program, middle) for task, program in tried)
        low, high = (low, middle) if fits else (middle, high)
    return high if high < most_bytes else None


def _fits(task: Task, program: ChunkProgram, memory_bytes: float) -> bool:
    candidates = Candidates(replace(task, memory_bytes=memory_bytes), program)
    candidates.cut_evenly()
    return candidates.best is not None


def _by_bytes(tasks: Sequence[Task]) -> list[Task]:
    return sorted(tasks, key=lambda task: (task.least_fixed_bytes / task.shape.ranks, task.shape.stages, task.lower_s))
