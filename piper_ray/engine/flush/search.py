"""The search over all (d, t): pipeline tails, then plans one by one, with a bound that holds at every moment."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from piper_ray.cost.tolerances import PROOF
from piper_ray.engine.flush.plans import ChosenStages, choose
from piper_ray.engine.flush.tables import Workload
from piper_ray.engine.flush.tasks import Task
from piper_ray.engine.kernels.flush_closing import best_stages, best_state, close_gap
from piper_ray.engine.kernels.flush_states import FINISHED, STOPPED, TOO_MANY, tails
from piper_ray.engine.kernels.flush_types import ONE_F_ONE_B, FlushTables
from piper_ray.engine.kernels.types import FloatArray
from piper_ray.model.stop import Stop, StoppedBy

_TIE = 1e-12
_FEW_NODES = 3_000
_MOST_NODES = 200_000
_MOST_STATES = 20_000_000
_LEVELS = 24
_LEAST_LEVEL = 0.4
_MOST_LEVEL = 1.1
_FIRST_SHARE = 0.005
_LARGE_SHARE = 4.0
"""How far above the bound plans are sought first; twice as far each time, up to where any plan will do."""
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
    left_open: StoppedBy | None


def run_task(tables: FlushTables, task: Task, control: FloatArray) -> TaskResult:
    """Searches one (d, t) for a plan that takes less than control[0], which it lowers when it finds one.

    A function of arrays, but for what others write to control[0], the best time known or asked for, and control[1], the
    wish to stop.
    """
    if task.lower_s > control[0] * (1.0 + _TIE):
        return TaskResult(np.inf, 0, False, None, None)
    downsets = tables.bits.shape[0]
    levels = np.zeros((1, 2))
    status, states = tails(tables, task.arrays, task.ahead, levels, _MOST_STATES, control)
    kept = int(states.stages.size)
    if status != FINISHED:
        return TaskResult(task.lower_s, kept, False, None, None if status == STOPPED else StoppedBy.TOO_MANY_STATES)
    state, lower_s = best_state(task.arrays, states, downsets)
    if state < 0:
        return TaskResult(np.inf, kept, False, None, None)
    found = choose(tables, task.arrays, best_stages(states, state))
    control[0] = min(control[0], found.batch_s)
    looked_through = False
    for most_nodes in (_FEW_NODES, _MOST_NODES):
        if lower_s >= control[0] * (1.0 - PROOF):
            return TaskResult(np.inf, kept, looked_through, found, None)
        if looked_through and task.arrays.schedule == ONE_F_ONE_B:
            # What stages in front bring into a tail's warm-up was left out. So once more with levels of it.
            levels = _levels(found)
            status, states = tails(tables, task.arrays, task.ahead, levels, _MOST_STATES, control)
            kept += int(states.stages.size)
            if status != FINISHED:
                break
            state, least_s = best_state(task.arrays, states, downsets)
            lower_s = max(lower_s, least_s)
            if state >= 0:
                found = _better(found, choose(tables, task.arrays, best_stages(states, state)))
                control[0] = min(control[0], found.batch_s)
        looked_through = True
        status, least_s, better, stages = close_gap(tables, task.arrays, levels, states, most_nodes, control)
        lower_s = max(lower_s, least_s)
        if better:
            found = _better(found, choose(tables, task.arrays, stages))
            control[0] = min(control[0], found.batch_s)
        if status != TOO_MANY:
            break
    if lower_s >= control[0] * (1.0 - PROOF):
        return TaskResult(np.inf, kept, looked_through, found, None)
    left_open = {FINISHED: StoppedBy.CHOICES_MERGED, STOPPED: None, TOO_MANY: StoppedBy.TOO_MANY_PLANS}[status]
    return TaskResult(lower_s, kept, looked_through, found, left_open)


def _levels(found: ChosenStages) -> FloatArray:
    """float64[l, 2]: none, and evenly from a part of a plan's largest forward and backward seconds to a little more."""
    shares = np.linspace(_LEAST_LEVEL, _MOST_LEVEL, _LEVELS)
    return np.concatenate([np.zeros((1, 2)), shares[:, None] * found.seconds[:, :2].max(axis=0)])


def _better(one: ChosenStages, other: ChosenStages) -> ChosenStages:
    return other if other.batch_s < one.batch_s else one


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
    stopped_by: StoppedBy | None = None
    states: int = 0

    def __post_init__(self) -> None:
        self._control = np.array([np.inf, 0.0])
        self._lower_s = {task.order: task.lower_s for task in self.tasks}
        self._left_open: dict[int, StoppedBy] = {}
        self._searched: set[int] = set()
        self._looked_through: set[int] = set()

    @property
    def searched(self) -> int:
        """Tasks that no bound ruled out."""
        return len(self._searched)

    @property
    def looked_through(self) -> int:
        """Tasks whose plans were looked at one by one."""
        return len(self._looked_through)

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
    def left_open(self) -> StoppedBy | None:
        """Why the search could not meet its bound, where it ended by itself and did not."""
        open_tasks = [order for order, lower_s in self._lower_s.items() if lower_s < self.upper_s * (1.0 - PROOF)]
        reasons = [self._left_open[order] for order in open_tasks if order in self._left_open]
        return reasons[0] if reasons else None

    def improve(self, workload: Workload, tasks: Sequence[Task]) -> None:
        """Plans of a lattice with fewer downsets, for an early upper bound. It proves nothing."""
        chain = FlushSearch(workload, tasks, self.threads, self.gap, self.deadline, self.stop)
        chain.run()
        self.best, self.best_workload = chain.best, workload

    def run(self) -> None:
        """Until the bound is met, or the gap, the deadline or a wish to stop comes first.

        From below: plans are sought that take hardly more than the bound, then ever more. So little is looked at that
        takes more than the best plan, and what is not found is proved not to be there.
        """
        share = _FIRST_SHARE
        with ThreadPoolExecutor(self.threads) as pool:
            while True:
                upper_s = self.upper_s
                cutoff_s = min(upper_s, self.lower_s * (1.0 + share))
                tasks = [task for task in self.tasks if self._lower_s[task.order] <= cutoff_s * (1.0 + _TIE)]
                self._seek(pool, tasks, cutoff_s)
                if self._ends() or self.proved or cutoff_s >= upper_s:
                    break
                share = 2.0 * share if share < _LARGE_SHARE else np.inf

    def _seek(self, pool: ThreadPoolExecutor, tasks: Sequence[Task], cutoff_s: float) -> None:
        """One round: plans of at most ``cutoff_s``."""
        self._control[0], self._control[1] = cutoff_s, 0.0
        waiting = list(reversed(tasks))
        running: dict[Future[TaskResult], Task] = {}
        try:
            while (waiting or running) and not self._ends():
                while waiting and len(running) < self.threads:
                    task = waiting.pop()
                    running[pool.submit(run_task, self.workload.arrays, task, self._control)] = task
                done, _ = wait(running, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
                for future in done:
                    self._take(running.pop(future), future.result())
        finally:
            self._control[1] = 1.0  # for those that still run, if it ends early
        for future, task in running.items():
            self._take(task, future.result())

    def _ends(self) -> bool:
        if self.stopped_by is None:
            if self.stop.requested:
                self.stopped_by = StoppedBy.INTERRUPT
            elif self.deadline is not None and time.perf_counter() >= self.deadline:
                self.stopped_by = StoppedBy.TIME_LIMIT
            elif self.lower_s >= self.upper_s * (1.0 - self.gap) and not self.proved:
                self.stopped_by = StoppedBy.GAP
        return self.stopped_by is not None

    def _take(self, task: Task, result: TaskResult) -> None:
        self.states += result.states
        if result.states:
            self._searched.add(task.order)
        if result.looked_through:
            self._looked_through.add(task.order)
        if result.found is not None and self._is_better(result.found):
            self.best, self.best_workload = result.found, self.workload
        # Others have lowered control[0] meanwhile, perhaps: what is proved holds for what is there now.
        proved_s = min(result.lower_s, self._control[0])
        self._lower_s[task.order] = max(self._lower_s[task.order], proved_s)
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
