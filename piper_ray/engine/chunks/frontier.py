"""A frontier under a schedule with chunks: what is proved and found on some devices goes on to fewer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from piper_ray.engine.chunks.problem import ChunkProblem
from piper_ray.engine.chunks.search import ChunkSearch, Known
from piper_ray.engine.first_run import compiling_told, of_chunks
from piper_ray.engine.frontier.curve_events import FrontierListener
from piper_ray.engine.frontier.points import FrontierStats
from piper_ray.engine.frontier.result import Frontier
from piper_ray.engine.frontier.walk import WalkedFrontier
from piper_ray.engine.search.limits import Limits
from piper_ray.model.cores import usable_cores
from piper_ray.model.events import Note, silent
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import Schedule
from piper_ray.model.solution import Solution
from piper_ray.model.step import StepTerms
from piper_ray.model.stop import Stop


def frontier_with_chunks(
    instance: Instance,
    devices: Sequence[int],
    restrictions: Restrictions,
    options: SolveOptions,
    schedules: Sequence[Schedule],
    listener: FrontierListener,
    stop: Stop[Frontier],
) -> Frontier:
    """instance: at the most of ``devices``, which rise. schedules: of one name, with the numbers of chunks that may be.

    Raises UsageError for constraints that such a search does not know.
    """
    started_s = time.perf_counter()
    restrictions.require_same_degrees(f"under schedule {schedules[0].name.value}")
    with compiling_told(listener, options.threads, of_chunks):
        problem = ChunkProblem.of(instance, restrictions, StepTerms(), schedules, lambda text: listener(Note(text)))
        solver = _ChunkSolver(problem, options.threads or usable_cores(), Limits.of(options, started_s, stop))
        found = WalkedFrontier(problem.instance, devices, restrictions, options, schedules[0], solver)
        found.chunks_differ = len(schedules) > 1
        if problem.impossible is not None:
            found.reason = problem.impossible.reason
        found.walk(listener, stop)
        return found


@dataclass
class _ChunkSolver:
    """Bounds of tasks and plans found are carried from one number of devices to the next."""

    problem: ChunkProblem
    threads: int
    limits: Limits

    def __post_init__(self) -> None:
        order = self.problem.order
        self.stats = FrontierStats(
            contracted_layers=order.size,
            downsets=order.downsets or 0,
            levels=order.size + 1,
            threads=self.threads,
            preparation_s=self.problem.tables_s,
        )
        self._known = Known()
        self._under_way: tuple[int, ChunkSearch] | None = None

    def solve(self, devices: int) -> Solution:
        search = self._search(devices)
        self._under_way = devices, search
        search.run()
        self._known, self._under_way = search.learnt, None
        self.stats = replace(
            self.stats, evaluations=self.stats.evaluations + 1, search_s=self.stats.search_s + search.seconds
        )
        return self.problem.solution(search)

    def so_far(self, devices: int) -> Solution:
        under_way = self._under_way
        search = under_way[1] if under_way is not None and under_way[0] == devices else self._search(devices)
        return self.problem.solution(search)

    def _search(self, devices: int) -> ChunkSearch:
        return self.problem.search(devices, self.threads, self.limits, silent, time.perf_counter(), self._known)
