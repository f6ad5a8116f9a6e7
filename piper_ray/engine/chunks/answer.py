"""A solve under a schedule whose ranks hold chunks of the model, as ``solve`` is asked for it and answers."""

from __future__ import annotations

from collections.abc import Sequence

from piper_ray.engine.chunks.memo import TurnMemo
from piper_ray.engine.chunks.problem import ChunkProblem
from piper_ray.engine.request import SolveRequest
from piper_ray.model.constraints import FilledPipeline, PipelinedChunks
from piper_ray.model.cores import usable_cores
from piper_ray.model.errors import UsageError
from piper_ray.model.schedule import Schedule
from piper_ray.model.solution import Solution, Status


def solve_with_chunks(request: SolveRequest, schedules: Sequence[Schedule]) -> Solution:
    """A plan whose simulated batch takes little, one d and one t for all, and what is proved of every plan's batch.

    schedules: of one name, with the numbers of chunks that may be. A plan's stages are its chunks, front to back, p v
    of them; ``StageCount`` is of p, the ranks. Value and bound are of a microbatch: seconds of a batch over N.

    Raises UsageError for what such a search does not know: a backend, constraints.
    """
    _refuse_unknown(request, schedules[0].name.value)
    problem = ChunkProblem.of(request.instance, request.restrictions, request.step, schedules, request.note)

    devices, limits = problem.instance.devices, request.limits
    threads = request.options.threads or usable_cores()
    with request.open_checkpoint(*schedules, kept="turns of a search") as checkpoint:
        memo = None if checkpoint is None else TurnMemo(checkpoint)
        search = problem.search(devices, threads, limits, request.listener, request.started_s, memo=memo)
        request.stop.offer(lambda: problem.solution(search))
        search.ledger.run(search)
    solution = problem.solution(search)
    if solution.status is not Status.INFEASIBLE:
        return solution
    try:
        return problem.solution(search, problem.explained(devices, lambda: limits.reached is not None))
    except KeyboardInterrupt:  # that there is no plan is proved all the same
        return solution


def _refuse_unknown(request: SolveRequest, name: str) -> None:
    how = f"under schedule {name}"
    if request.backend is not None:
        raise UsageError("a cluster cannot solve under schedules with chunks yet: leave out the backend (--address)")
    request.restrictions.require_same_degrees(how, FilledPipeline, PipelinedChunks)
