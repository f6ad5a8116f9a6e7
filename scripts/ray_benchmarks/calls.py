"""What workers make of the calls of a search: each call runs here, alone, and its CPU time counts on a clock that goes
as if that many workers had taken the calls. So a machine that others share can show what a cluster would gain.

A call does not hear of what others find meanwhile, so under schedules with a flush the gain is understated.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from piper_ray.engine.backends.calls import Call, Finished, Workers
from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.solve import solve
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.solution import Solution
from scripts.benchmarks.table import Table, ratio, seconds

CALL_S = 2e-3
"""Seconds from the driver to a worker and back."""
IN_FLIGHT = 2
"""The calls that ``ClusterWorkers`` gives each worker at once; the driver keeps one of its own."""


@dataclass
class ClockedWorkers:
    """Simulated ``workers`` of one core each.

    now_s: the time of the clock. work_s: seconds of calls. lost_s: seconds of recalled calls. driver_s: seconds of the
    search apart from its calls. cpu_s: the thread's CPU time.
    """

    workers: int
    cpu_s: Callable[[], float] = time.thread_time
    now_s: float = 0.0
    work_s: float = 0.0
    lost_s: float = 0.0
    driver_s: float = 0.0
    longest_s: float = 0.0
    calls: int = 0
    _flying: list[tuple[float, int, Call, object, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._free_s = [0.0] * self.workers
        self._seen_s = self.cpu_s()

    @property
    def width(self) -> int:
        return 1 if self.workers == 1 else 1 + IN_FLIGHT * self.workers

    def give(self, call: Call) -> None:
        """Runs the call; it is done when a worker would have been done."""
        self._count_driver()
        result = call.function(*call.shared, *call.arguments, np.array([call.bound_s, 0.0]))
        spent_s, self._seen_s = self.cpu_s() - self._seen_s, self.cpu_s()
        sent_s = self.now_s if self.workers == 1 else self.now_s + CALL_S
        done_s = max(heapq.heappop(self._free_s), sent_s) + spent_s
        heapq.heappush(self._free_s, done_s)
        heapq.heappush(self._flying, (done_s, self.calls, call, result, spent_s))
        self.calls, self.work_s, self.longest_s = self.calls + 1, self.work_s + spent_s, max(self.longest_s, spent_s)

    def tell(self, bound_s: float) -> None:
        """The calls are done by then."""

    def heard_s(self) -> float:
        return np.inf

    def done(self, timeout_s: float) -> Sequence[Finished]:
        self._count_driver()
        if self._flying and timeout_s > 0.0:
            self.now_s = max(self.now_s, self._flying[0][0])
        return [*self._finished()]

    def recall(self) -> Sequence[Finished]:
        self._count_driver()
        self.lost_s += sum(spent_s for *_, spent_s in self._flying)
        self._flying.clear()
        self._free_s = [self.now_s] * self.workers
        return []

    def close(self) -> None:
        self._count_driver()

    def _finished(self) -> Iterator[Finished]:
        while self._flying and self._flying[0][0] <= self.now_s:
            _, _, call, result, _ = heapq.heappop(self._flying)
            yield Finished(call, result)

    def _count_driver(self) -> None:
        spent_s, self._seen_s = self.cpu_s() - self._seen_s, self.cpu_s()
        self.now_s, self.driver_s = self.now_s + spent_s, self.driver_s + spent_s


class ClockedBackend(LocalBackend):
    """A backend whose calls run on such workers; it keeps the ones opened last."""

    def __init__(self, workers: int, cpu_s: Callable[[], float] = time.thread_time) -> None:
        super().__init__(1)
        self._workers, self._cpu_s = workers, cpu_s
        self.opened = ClockedWorkers(workers, cpu_s)

    def open_workers(self) -> Workers:
        self.opened = ClockedWorkers(self._workers, self._cpu_s)
        return self.opened


def clocked(instance: Instance, schedule: str, options: SolveOptions, workers: int) -> tuple[Solution, ClockedWorkers]:
    """A solve on a number of workers, and what they did."""
    backend = ClockedBackend(workers)
    try:
        return solve(instance, schedule=schedule, options=options, backend=backend), backend.opened
    finally:
        backend.close()


def calls_table(instance: Instance, schedule: str, options: SolveOptions, counts: Sequence[int]) -> Table:
    """One row for each number of workers. Raises AssertionError where answers differ."""
    rows, first, alone_s = [], None, 0.0
    for count in counts:
        found, did = clocked(instance, schedule, options, count)
        answer = found.status, found.plan, found.time_per_sample_s, found.lower_bound_s, found.stopped_by
        first, alone_s = first or answer, alone_s or did.now_s
        assert answer == first, f"{count} workers answer otherwise"
        times_s = did.now_s, did.work_s, did.lost_s, did.driver_s, did.longest_s
        shares = ratio(alone_s, did.now_s), ratio(did.work_s, count * did.now_s)
        rows.append((f"{count}", f"{did.calls:,}", *map(seconds, times_s), *shares))
    head = ("workers", "calls", "time", "work", "not needed", "driver", "longest call", "1 / n", "busy")
    note = (
        "CPU time of calls that ran one after the other, as this number of workers of one core would take them; "
        f"{CALL_S * 1e3:g} ms to each."
    )
    return Table(f"{instance.name}, {schedule}", note, head, tuple(rows))
