"""A solve under a schedule whose ranks hold chunks of the model, as it is asked for and answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from piper_ray.engine.chunks.candidates import Candidate
from piper_ray.engine.chunks.memo import TurnMemo
from piper_ray.engine.chunks.problem import ChunkProblem
from piper_ray.engine.chunks.search import ChunkSearch, Known
from piper_ray.engine.ledger import Ledger
from piper_ray.engine.request import SolveRequest
from piper_ray.model.constraints import FilledPipeline, PipelinedChunks
from piper_ray.model.schedule import Schedule
from piper_ray.model.solution import Solution, Status


def solve_with_chunks(request: SolveRequest, schedules: Sequence[Schedule]) -> Solution:
    """A plan whose simulated batch takes little, one d and one t for all, and what is proved of every plan's batch.

    schedules: of one name, with the numbers of chunks that may be. A plan's stages are its chunks, front to back, p v
    of them; ``StageCount`` is of p, the ranks. Value and bound are of a microbatch: seconds of a batch over N.

    Raises UsageError for constraints that such a search does not know, and for a backend that takes no calls.
    """
    series = ChunkSeries(request, schedules)
    return series.explained(request, series.solve(request))


class ChunkSeries:
    """Solves of one workload on several numbers of devices: they share the order of layers, and the bound and the best
    plan of each (d, t, p, v).

    first: on the most devices of all. preparation_s: what is shared took so long to make, since somebody asked. Raises
    UsageError for constraints that such a search does not know.
    """

    def __init__(self, first: SolveRequest, schedules: Sequence[Schedule]) -> None:
        how = f"under schedule {schedules[0].name.value}"
        first.restrictions.require_same_degrees(how, FilledPipeline, PipelinedChunks)
        self._schedules, self._known = schedules, Known()
        self._problem = ChunkProblem.of(first.instance, first.restrictions, first.step, schedules, first.note)
        self.preparation_s = self._problem.tables_s

    def solve(self, request: SolveRequest) -> Solution:
        """On so many devices as the request has. Where there is no plan, not yet why."""
        problem = self._problem
        ledger = Ledger[Candidate](
            problem.instance.microbatches,
            request.limits,
            request.listener,
            request.started_s,
            request.step.optimizer_s,
        )

        def answer() -> Solution:
            return request.with_cluster(problem.solution(search))

        with (
            request.open_checkpoint(*self._schedules, kept="turns of a search") as checkpoint,
            request.open_workers() as workers,
        ):
            memo = None if checkpoint is None else TurnMemo(checkpoint)
            tasks = problem.tasks(request.instance.devices)
            search = ChunkSearch(tasks, workers, ledger, self._known, memo)
            request.stop.offer(answer)
            ledger.run(search)
        self._known = search.learnt
        return answer()

    def explained(self, request: SolveRequest, found: Solution) -> Solution:
        """Where there is no plan, with the reason, and the memory that would do."""
        if found.status is not Status.INFEASIBLE:
            return found
        limits = request.limits
        try:
            why = self._problem.explained(request.instance.devices, lambda: limits.reached is not None)
        except KeyboardInterrupt:  # that there is no plan is proved all the same
            return found
        return replace(found, infeasibility=why)
