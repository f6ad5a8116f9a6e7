"""The search over all (d, t): pipeline tails, then plans one by one, with a bound that holds at every moment."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from piper_ray.engine.flush.plans import ChosenStages, choose
from piper_ray.engine.flush.tables import Workload
from piper_ray.engine.flush.tasks import Task
from piper_ray.engine.kernels.flush_closing import best_stages, best_state, close_gap
from piper_ray.engine.kernels.flush_states import FINISHED, STOPPED, tails
from piper_ray.engine.kernels.flush_types import FlushTables
from piper_ray.engine.kernels.types import FloatArray
from piper_ray.model.stop import INTERRUPT, Stop

PROOF = 1e-9
"""Relative: nothing that much below a value exists if it is called optimal."""

TIME_LIMIT = "time limit"
GAP = "gap"
TOO_MANY_PLANS = "too many plans"
TOO_MANY_STATES = "too many states"
CHOICES_MERGED = "TMPC choices merged"

_TIE = 1e-12
_MOST_NODES = 200_000
_MOST_STATES = 20_000_000
_LOOK_S = 0.05
"""How often the main thread looks whether to stop."""


@dataclass(frozen=True)
class TaskResult:
    """What was found in one task. lower_s: on those of its plans that take less than the best known; inf: none does.

    left_open: why the bound is not met, where it is not.
    """

    lower_s: float
    states: int
    looked_through: bool
    found: ChosenStages | None
    left_open: str | None


def run_task(tables: FlushTables, task: Task, control: FloatArray, close: bool) -> TaskResult:
    """Searches one (d, t). A function of arrays, but for control[0], the best time known, which it lowers, and
    control[1], the wish to stop. ``close``: where the best state's time is not its plan's, plans are looked through.
    """
    if task.lower_s > control[0] * (1.0 + _TIE):
        return TaskResult(np.inf, 0, False, None, None)
    status, states = tails(tables, task.arrays, task.ahead, _MOST_STATES, control)
    kept = int(states.stages.size)
    if status != FINISHED:
        return TaskResult(task.lower_s, kept, False, None, None if status == STOPPED else TOO_MANY_STATES)
    state, lower_s = best_state(task.arrays, states)
    if state < 0:
        return TaskResult(np.inf, kept, False, None, None)
    found = choose(tables, task.arrays, best_stages(states, state))
    control[0] = min(control[0], found.batch_s)
    if lower_s >= control[0] * (1.0 - PROOF):
        return TaskResult(np.inf, kept, False, found, None)
    if not close:
        return TaskResult(lower_s, kept, False, found, None)
    status, lower_s, better, stages = close_gap(tables, task.arrays, states, _MOST_NODES, control)
    if better:
        found = choose(tables, task.arrays, stages)
        control[0] = min(control[0], found.batch_s)
    left_open = None
    if np.isfinite(lower_s):
        left_open = {FINISHED: CHOICES_MERGED, STOPPED: None}.get(status, TOO_MANY_PLANS)
    return TaskResult(lower_s, kept, True, found, left_open)


@dataclass
class FlushSearch:
    """One search. ``best`` and ``lower_s`` are valid at every moment, for other threads too."""

    workload: Workload
    tasks: Sequence[Task]
    threads: int
    gap: float = 0.0
    deadline: float | None = None
    stop: Stop[Any] = field(default_factory=Stop)
    best: ChosenStages | None = None
    best_workload: Workload | None = None  # that ``best`` is told in
    stopped_by: str | None = None
    states: int = 0
    searched: int = 0
    looked_through: int = 0

    def __post_init__(self) -> None:
        self._control = np.array([np.inf, 0.0])
        self._lower_s = {task.order: task.lower_s for task in self.tasks}
        self._left_open: dict[int, str] = {}

    @property
    def upper_s(self) -> float:
        return np.inf if self.best is None else self.best.batch_s

    @property
    def lower_s(self) -> float:
        """No plan's batch takes less. inf: there is no plan."""
        return min([self.upper_s, *self._lower_s.values()])

    @property
    def proved(self) -> bool:
        return self.lower_s >= self.upper_s * (1.0 - PROOF)

    @property
    def left_open(self) -> str | None:
        """Why the search could not meet its bound, where it ended by itself and did not."""
        open_tasks = [order for order, lower_s in self._lower_s.items() if lower_s < self.upper_s * (1.0 - PROOF)]
        reasons = [self._left_open[order] for order in open_tasks if order in self._left_open]
        return reasons[0] if reasons else None

    def improve(self, workload: Workload, tasks: Sequence[Task]) -> None:
        """Plans of a lattice with fewer downsets, for an early upper bound. It proves nothing."""
        self._run(workload, tasks, proves=False)

    def run(self) -> None:
        """Until the bound is met, or the gap, the deadline or a wish to stop comes first."""
        self._run(self.workload, self.tasks, proves=True)

    def _run(self, workload: Workload, tasks: Sequence[Task], proves: bool) -> None:
        waiting = list(reversed(tasks))
        running: dict[Future[TaskResult], Task] = {}
        with ThreadPoolExecutor(self.threads) as pool:
            try:
                while (waiting or running) and not self._ends():
                    while waiting and len(running) < self.threads:
                        task = waiting.pop()
                        running[pool.submit(run_task, workload.arrays, task, self._control, proves)] = task
                    done, _ = wait(running, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
                    for future in done:
                        self._take(workload, running.pop(future), future.result(), proves)
            finally:
                self._control[1] = 1.0  # for those that still run, if it ends early
            for future, task in running.items():
                self._take(workload, task, future.result(), proves)
        self._control[1] = 0.0

    def _ends(self) -> bool:
        if self.stopped_by is None:
            if self.stop.requested:
                self.stopped_by = INTERRUPT
            elif self.deadline is not None and time.perf_counter() >= self.deadline:
                self.stopped_by = TIME_LIMIT
            elif self.lower_s >= self.upper_s * (1.0 - self.gap) and not self.proved:
                self.stopped_by = GAP
        return self.stopped_by is not None

    def _take(self, workload: Workload, task: Task, result: TaskResult, proves: bool) -> None:
        self.states += result.states
        self.searched += result.states > 0
        self.looked_through += result.looked_through
        if result.found is not None and self._is_better(result.found):
            self.best, self.best_workload = result.found, workload
        if proves:
            self._lower_s[task.order] = max(self._lower_s[task.order], result.lower_s)
            if result.left_open is not None:
                self._left_open[task.order] = result.left_open

    def _is_better(self, found: ChosenStages) -> bool:
        """Of plans that take the same but for rounding the one of fewest devices, then of fewest stages, then of the
        least d."""
        if self.best is None or found.batch_s < self.best.batch_s * (1.0 - _TIE):
            return True
        return found.batch_s <= self.best.batch_s * (1.0 + _TIE) and _rank(found) < _rank(self.best)


def _rank(chosen: ChosenStages) -> tuple[int, int, int]:
    return chosen.devices, chosen.stages, chosen.task.data_parallel_degree
