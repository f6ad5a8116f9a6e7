"""The search over all (d, t, p, v): always at the task whose bound is the least, which so rises for all."""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from piper_ray.engine.chunks.candidates import Candidate, Candidates
from piper_ray.engine.chunks.relaxation import Relaxation
from piper_ray.engine.chunks.tasks import Task
from piper_ray.engine.kernels.types import FloatArray
from piper_ray.model.stop import INTERRUPT, Stop

PROOF = 1e-9
"""Relative: nothing that much below a value exists if it is called optimal."""

TIME_LIMIT = "time limit"
GAP = "gap"
BOUND = "bound"

_LOOK_S = 0.05
"""How often the main thread looks whether to stop."""


class Effort(NamedTuple):
    """looks, rounds: as in ``Relaxation.improve``. moves: of its best plans."""

    looks: int
    rounds: int
    moves: int


EFFORTS = (Effort(2, 100, 400), Effort(8, 150, 4_000), Effort(25, 250, 20_000), Effort(40, 400, 40_000))
"""What is done for a task, the first time it is the one of the least bound, the second time, and so on."""


@dataclass
class _Work:
    """A task under way. done: efforts made."""

    task: Task
    lower_s: float
    done: int = 0
    relaxation: Relaxation | None = None
    candidates: Candidates | None = None

    def run(self, control: FloatArray) -> Candidate | None:
        """The next effort. control[0] is the best time known, control[1] the wish to stop."""
        effort = EFFORTS[self.done]
        if self.done == 0:
            self.relaxation = Relaxation.of(self.task)
            if self.relaxation is not None:
                self.candidates = Candidates(self.relaxation)
        self.done += 1
        if self.relaxation is None or self.candidates is None:
            self.lower_s = np.inf
            return None
        for _ in range(effort.looks):
            self.relaxation.improve(1, effort.rounds)
            self.lower_s = max(self.lower_s, self.relaxation.lower_s)
            if self.lower_s >= control[0] * (1.0 - PROOF):
                return None
            if control[1] != 0.0:
                break
        self.candidates.cut()
        self.candidates.move(effort.moves, control)
        best = self.candidates.best
        if best is not None:
            control[0] = min(control[0], best.batch_s)
        return best


@dataclass
class ChunkSearch:
    """One search. ``best`` and ``lower_s`` are valid at every moment, for other threads too."""

    tasks: Sequence[Task]
    threads: int
    gap: float = 0.0
    deadline: float | None = None
    stop: Stop[Any] = field(default_factory=Stop)
    best: Candidate | None = None
    stopped_by: str | None = None
    bounded: int = 0

    def __post_init__(self) -> None:
        self._control = np.array([np.inf, 0.0])
        self._work = [_Work(task, task.lower_s) for task in self.tasks]

    @property
    def upper_s(self) -> float:
        return np.inf if self.best is None else self.best.batch_s

    @property
    def lower_s(self) -> float:
        """No plan's batch takes less. inf: there is no plan."""
        return min([self.upper_s, *(work.lower_s for work in self._work)])

    @property
    def proved(self) -> bool:
        return self.lower_s >= self.upper_s * (1.0 - PROOF)

    def run(self) -> None:
        """Until the bound is met or gets no further, or the gap, the deadline or a wish to stop comes first."""
        waiting = [(work.lower_s, index) for index, work in enumerate(self._work)]
        heapq.heapify(waiting)
        running: dict[Future[Candidate | None], int] = {}
        with ThreadPoolExecutor(self.threads) as pool:
            try:
                while (waiting or running) and not self._ends():
                    while waiting and len(running) < self.threads:
                        _, index = heapq.heappop(waiting)
                        work = self._work[index]
                        if work.lower_s >= self.upper_s * (1.0 - PROOF):
                            waiting.clear()
                        elif work.done == len(EFFORTS):
                            # No other effort raises the least bound.
                            waiting.clear()
                        else:
                            self.bounded += work.done == 0
                            running[pool.submit(work.run, self._control)] = index
                    done, _ = wait(running, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
                    for future in done:
                        index = running.pop(future)
                        self._take(future.result())
                        heapq.heappush(waiting, (self._work[index].lower_s, index))
            finally:
                self._control[1] = 1.0  # for those that still run, if it ends early
            for future in running:
                self._take(future.result())
        if self.stopped_by is None and not self.proved:
            self.stopped_by = BOUND

    def _ends(self) -> bool:
        if self.stop.requested:
            self.stopped_by = INTERRUPT
        elif self.deadline is not None and time.perf_counter() >= self.deadline:
            self.stopped_by = TIME_LIMIT
        elif self.best is not None and self.lower_s >= self.upper_s * (1.0 - self.gap) and not self.proved:
            self.stopped_by = GAP
        return self.stopped_by is not None

    def _take(self, found: Candidate | None) -> None:
        if found is not None and (self.best is None or _rank(found) < _rank(self.best)):
            self.best = found


def _rank(found: Candidate) -> tuple[float, int, int]:
    """Of plans that take the same the one of fewest devices, then of fewest chunks."""
    return found.batch_s, found.task.devices, found.task.shape.stages
