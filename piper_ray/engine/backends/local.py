"""The default backend: threads of this process. The kernels release the GIL."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from piper_ray.compiled.jit import is_loaded
from piper_ray.engine.backends.calls import ThreadWorkers, Workers
from piper_ray.engine.evaluation.backend import Activity, NextBatch, OnProgress
from piper_ray.engine.evaluation.state_tables import StateTables, between, evaluate_downsets, joined, no_states
from piper_ray.engine.kernels.buckets import BUCKET_SIZE
from piper_ray.engine.kernels.level import evaluate_runs
from piper_ray.engine.kernels.selection import StepCache, make_step_cache
from piper_ray.engine.kernels.types import Earlier, LevelStates, Tables
from piper_ray.model.cores import usable_cores
from piper_ray.model.events import Listener

_TASK_S = 0.02
"""Target duration of a task, by the measured rates."""

_HEARTBEAT_S = 0.1
"""Seconds between reports of progress during a longer task."""

_SMALL_LEVEL_S = 1e-3
"""For a level that takes less than this, threads cost more than they save."""

_LONG_RUN_S = 0.02
"""Target duration of small levels in one kernel call, which cannot be interrupted."""


class Worked(NamedTuple):
    """States, and the CPU seconds that all threads together spent on them."""

    states: LevelStates
    seconds: float


class LocalBackend:
    """Splits a level into tasks of about equal cost for ``threads`` threads."""

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads or usable_cores()
        self._scratch = threading.local()
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="piper-ray")

    @property
    def threads(self) -> int:
        return self._threads

    def next_batch(self, states: StateTables) -> NextBatch:
        """Returns one level, since threads are quick to start; or several small levels, for one kernel call."""
        end_level = end_of_small_levels(states)
        if end_level > states.level:
            return NextBatch(end_level, here=True)
        return NextBatch(states.level + 1, here=False)

    def open_workers(self) -> Workers:
        """Opens as many additional threads, for calls. Close them after use."""
        return ThreadWorkers(self._threads)

    def listen(self, listener: Listener) -> None:
        """Does nothing: there are no notes."""

    def activity(self) -> Activity:
        return Activity(self._threads, 0)

    def stats(self) -> None:
        return None

    def evaluate_downsets(self, states: StateTables, first: int, last: int, on_progress: OnProgress) -> LevelStates:
        return self.evaluate(states, first, last, on_progress).states

    def evaluate(
        self,
        states: StateTables,
        first: int,
        last: int,
        on_progress: OnProgress,
        *,
        buckets: int | None = None,
        earlier: Earlier | None = None,
    ) -> Worked:
        """Does ``evaluate_downsets``. buckets: over that many of the first finished ones; None: all. earlier: what is
        known of these downsets."""
        arrays = states.arrays if buckets is None else states.arrays_over(buckets)
        known = Earlier(0, no_states(last - first)) if earlier is None else earlier
        # Every downset tests the same buckets, so equal counts have about equal costs.
        bounds = (last - first) * (int(arrays.buckets.used[0]) - known.buckets)
        rate = states.rates.far if earlier is None else states.rates.near
        tasks = max(1, min(last - first, max(4 * self._threads, int(rate.seconds(bounds) / _TASK_S))))
        if earlier is not None and rate.seconds(bounds) < _SMALL_LEVEL_S:
            tasks = 1
        loaded = is_loaded(evaluate_runs)
        edges = np.linspace(first, last, tasks + 1).astype(np.int64).tolist()

        def run(begin: int, end: int) -> tuple[LevelStates, float]:
            steps = self._scratch_of(states.tables)
            mine = known._replace(states=between(known.states, begin - first, end - first))
            began = time.thread_time()
            found = evaluate_downsets(begin, end, arrays, mine, steps)
            return found, time.thread_time() - began

        futures = [self._pool.submit(run, begin, end) for begin, end in pairwise(edges)]
        parts: list[LevelStates] = []
        worked_s = 0.0
        try:
            for future in futures:
                while not wait([future], timeout=_HEARTBEAT_S).done:
                    on_progress(edges[len(parts)] - first)
                part, seconds = future.result()
                parts.append(part)
                worked_s += seconds
                on_progress(edges[len(parts)] - first)
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        if loaded:
            rate.record(bounds, worked_s)
        found = joined(parts)
        return Worked(found._replace(tested=found.tested + known.states.tested), worked_s)

    def _scratch_of(self, tables: Tables) -> StepCache:
        """Returns the calling thread's scratch for these options and this memory limit."""
        options, memory_bytes = tables.options, tables.cluster.memory_bytes
        if getattr(self._scratch, "options", None) is not options or self._scratch.memory_bytes != memory_bytes:
            self._scratch.options, self._scratch.memory_bytes = options, memory_bytes
            self._scratch.cache = make_step_cache(tables)
        cache: StepCache = self._scratch.cache
        return cache

    def close(self) -> None:
        """Ends the threads, each after its current task: a search that was stopped does not wait."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def end_of_small_levels(states: StateTables) -> int:
    """Returns the level after the last one of a run of small levels worth one kernel call, from the first unfinished
    one on.

    Costs are counted in bucket bounds, as if every downset in between were live and all their buckets full.
    """
    starts = states.tables.lattice.level_start
    level, buckets, total = states.level, states.buckets_used, 0
    rate = states.rates.far
    longest = rate.bounds_within(_LONG_RUN_S)
    while level < starts.size - 1:
        size = int(starts[level + 1] - starts[level])
        total += size * buckets
        if rate.seconds(size * buckets) > _SMALL_LEVEL_S or (total > longest and level > states.level):
            break
        buckets += 1 + size // BUCKET_SIZE
        level += 1
    return level
