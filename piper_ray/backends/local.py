"""The default executor: threads of this process. The kernels hold no GIL."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from piper_ray.backends import Heartbeat, LevelStates
from piper_ray.kernels.level import COUNTERS, evaluate_downsets
from piper_ray.kernels.selection import StepCache, make_step_cache
from piper_ray.kernels.types import BlockArrays, FrontArrays, Target
from piper_ray.problem import Problem

_BLOCKS_PER_TASK = 2_000_000
"""Block bounds in one task: some tens of milliseconds, so that an interrupt is seen soon."""


class LocalBackend:
    """Splits a level into tasks of about equal cost for ``threads`` threads."""

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads or len(os.sched_getaffinity(0))
        self._scratch = threading.local()
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="piper-ray")

    @property
    def threads(self) -> int:
        return self._threads

    def evaluate_level(
        self,
        problem: Problem,
        target: Target,
        fronts: FrontArrays,
        blocks: BlockArrays,
        first: int,
        last: int,
        heartbeat: Heartbeat,
    ) -> LevelStates:
        # Every downset of a level looks at the same blocks, so equal counts are about equal cost.
        cost = (last - first) * int(blocks.used[0])
        tasks = max(1, min(last - first, max(4 * self._threads, cost // _BLOCKS_PER_TASK)))
        edges = np.linspace(first, last, tasks + 1).astype(np.int64).tolist()

        def run(begin: int, end: int) -> LevelStates:
            tested = np.zeros(COUNTERS, np.int64)
            counts, costs, sums = evaluate_downsets(
                begin,
                end,
                problem.tables,
                target,
                fronts,
                blocks,
                self._scratch_of(problem),
                tested,
            )
            return LevelStates(counts, costs, sums, tested)

        futures = [self._pool.submit(run, begin, end) for begin, end in pairwise(edges)]
        parts: list[LevelStates] = []
        try:
            for future in futures:
                parts.append(future.result())
                heartbeat(edges[len(parts)] - first)
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        return LevelStates(
            np.concatenate([part.counts for part in parts]),
            np.concatenate([part.costs for part in parts]),
            np.concatenate([part.sums for part in parts]),
            np.sum([part.tested for part in parts], axis=0),
        )

    def _scratch_of(self, problem: Problem) -> StepCache:
        """The calling thread's scratch for this problem."""
        if getattr(self._scratch, "problem", None) is not problem:
            self._scratch.problem, self._scratch.cache = problem, make_step_cache(problem.options)
        cache: StepCache = self._scratch.cache
        return cache

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)
