"""The search over all (d, t): rounds of tasks at rising times, with a bound that holds at every moment."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from piper_ray.cost.tolerances import PROOF
from piper_ray.engine.flush.crew import Crew
from piper_ray.engine.flush.incumbent import Incumbent
from piper_ray.engine.flush.plans import ChosenStages
from piper_ray.engine.flush.task_search import TIE, TaskResult
from piper_ray.engine.flush.tasks import DegreePair
from piper_ray.engine.kernels.flush_types import FlushTables
from piper_ray.engine.search.limits import Limits
from piper_ray.model.events import Bounds, DegreesAdvanced, DegreesSearched, IncumbentFound, Listener, silent
from piper_ray.model.stop import StoppedBy

_FIRST_SHARE = 0.005
_LARGE_SHARE = 4.0
"""How far above the bound plans are sought first; twice as far each time, up to where any plan will do."""
_LOOK_S = 0.05
"""How often is looked whether to stop."""


Degrees = tuple[int, int]
"""d and t."""


class Memo(Protocol):
    """Keeps results of tasks, so that none is searched twice. Both raise CheckpointLost if another solve has taken it
    over.
    """

    def result(self, task: DegreePair, cutoff_s: float) -> TaskResult | None:
        """Of a search for plans of at most so many seconds a batch, if it is on record."""
        ...

    def record(self, task: DegreePair, cutoff_s: float, result: TaskResult) -> None:
        """lower_s of the result is finite."""
        ...


@dataclass
class FlushSearch:
    """One search. ``best`` and ``lower_s`` are valid at every moment, for other threads too.

    microbatches: of a batch, which the listener's times are divided by. started_s: what its events count from, by
    ``time.perf_counter``. proved_s: what is known beforehand of tasks, by (d, t): none of its plans takes less.
    """

    tables: FlushTables
    tasks: Sequence[DegreePair]
    crew: Crew
    microbatches: int
    limits: Limits = field(default_factory=Limits)
    listener: Listener = silent
    started_s: float = field(default_factory=time.perf_counter)
    proved_s: Mapping[Degrees, float] = field(default_factory=dict)
    memo: Memo | None = None

    def __post_init__(self) -> None:
        self.stopped_by: StoppedBy | None = None
        self.states = 0
        self._began_s = time.perf_counter()
        self._ended_s: float | None = None
        self.incumbent = Incumbent(self._tell_of_plan)
        self._bound_s = np.inf  # that plans must beat
        self._lower_s = {task.order: max(task.lower_s, self.proved_s.get(task.degrees, 0.0)) for task in self.tasks}
        self._left_open: dict[int, StoppedBy] = {}
        self._searched: set[int] = set()
        self._looked_through: set[int] = set()

    @property
    def best(self) -> ChosenStages | None:
        """The best plan known."""
        return self.incumbent.best

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
        """Of the best plan known; inf if there is none."""
        return self.incumbent.batch_s

    @property
    def lower_s(self) -> float:
        """No plan's batch takes less. inf: there is no plan."""
        return min([self.upper_s, *self._lower_s.values()])

    @property
    def proved(self) -> bool:
        """Whether the bound is met."""
        return self.lower_s >= self.upper_s * (1.0 - PROOF)

    @property
    def left_open(self) -> StoppedBy | None:
        """Why the search could not meet its bound, where it ended by itself and did not."""
        open_tasks = [order for order, lower_s in self._lower_s.items() if lower_s < self.upper_s * (1.0 - PROOF)]
        reasons = [self._left_open[order] for order in open_tasks if order in self._left_open]
        return reasons[0] if reasons else None

    @property
    def seconds(self) -> float:
        """Since it was made, up to its end."""
        return (time.perf_counter() if self._ended_s is None else self._ended_s) - self._began_s

    def proved_of_tasks(self) -> dict[Degrees, float]:
        """As ``proved_s``, for a search with fewer plans."""
        return {task.degrees: self._lower_s[task.order] for task in self.tasks}

    def improve(self, tables: FlushTables, tasks: Sequence[DegreePair]) -> None:
        """Plans of a lattice with fewer downsets, for an early upper bound. It proves nothing."""
        chain = FlushSearch(tables, tasks, self.crew, self.microbatches, self.limits)
        chain.incumbent = self.incumbent
        chain.run("chain")

    def run(self, origin: str = "search") -> None:
        """Until the bound is met, or the gap, the deadline or a wish to stop comes first; so does KeyboardInterrupt.

        From below: plans are sought that take hardly more than the bound, then ever more. So little is looked at that
        takes more than the best plan, and what is not found is proved not to be there.
        """
        share, index = _FIRST_SHARE, 0
        while self.tasks and not self._ends():
            index += 1
            began_s, upper_s = time.perf_counter(), self.upper_s
            cutoff_s = min(upper_s, self.lower_s * (1.0 + share))
            tasks = [task for task in self.tasks if self._lower_s[task.order] <= cutoff_s * (1.0 + TIE)]
            round_ = _Round(index, cutoff_s, len(tasks), began_s)
            try:
                self._seek(tasks, round_, origin)
                if self.stopped_by is None:
                    self._tell_of_round(round_)
            except KeyboardInterrupt:
                self.stopped_by = StoppedBy.INTERRUPT
            if self.proved or cutoff_s >= upper_s:
                break
            share = 2.0 * share if share < _LARGE_SHARE else np.inf
        self._ended_s = time.perf_counter()

    def _seek(self, tasks: Sequence[DegreePair], round_: _Round, origin: str) -> None:
        """One round: plans of at most ``cutoff_s``."""
        crew = self.crew
        self._bound_s = round_.cutoff_s
        waiting = list(reversed(tasks))
        running = 0
        try:
            while (waiting or running) and not self._ends():
                while waiting and running < crew.width:
                    task = waiting.pop()
                    known = None if self.memo is None else self.memo.result(task, round_.cutoff_s)
                    if known is not None:
                        self._take(task, known, origin)
                        continue
                    crew.give(self.tables, task, self._bound_s)
                    running += 1
                self._tell_of_progress(round_, len(tasks) - len(waiting) - running, running)
                for task, result in crew.done(_LOOK_S):
                    running -= 1
                    proved_s = self._take(task, result, origin)
                    if self.memo is not None:
                        self.memo.record(task, round_.cutoff_s, replace(result, lower_s=proved_s))
                self._lower_bound(crew.heard_s())
        finally:
            for task, result in crew.recall():
                self._take(task, result, origin)

    def _lower_bound(self, bound_s: float) -> None:
        if bound_s < self._bound_s:
            self._bound_s = bound_s
            self.crew.tell(bound_s)

    def _ends(self) -> bool:
        if self.stopped_by is None:
            if self.limits.stop.requested:
                self.stopped_by = StoppedBy.INTERRUPT
            elif self.limits.deadline_s is not None and time.perf_counter() >= self.limits.deadline_s:
                self.stopped_by = StoppedBy.TIME_LIMIT
            elif self.lower_s >= self.upper_s * (1.0 - self.limits.gap) and not self.proved:
                self.stopped_by = StoppedBy.GAP
            elif self.upper_s > self.lower_s > self.limits.within_s * self.microbatches:
                self.stopped_by = StoppedBy.TOO_SLOW
        return self.stopped_by is not None

    def _take(self, task: DegreePair, result: TaskResult, origin: str) -> float:
        """Returns what is proved of all plans of the task: no batch takes less, in s."""
        self.states += result.states
        if result.states:
            self._searched.add(task.order)
        if result.looked_through:
            self._looked_through.add(task.order)
        if result.found is not None:
            self._lower_bound(result.found.batch_s)
        # What is proved holds for the bound that the task had; that was never below the one that there is now.
        proved_s = min(result.lower_s, self._bound_s)
        self._lower_s[task.order] = max(self._lower_s[task.order], proved_s)
        if result.left_open is not None:
            self._left_open[task.order] = result.left_open
        if result.found is not None:
            self.incumbent.offer(result.found, origin)
        return proved_s

    def _bounds(self) -> Bounds:
        upper_s = self.upper_s / self.microbatches if np.isfinite(self.upper_s) else None
        return Bounds(self.lower_s / self.microbatches, upper_s, time.perf_counter() - self.started_s)

    def _tell_of_plan(self, origin: str) -> None:
        best = self.best
        assert best is not None
        per_sample_s = best.batch_s / self.microbatches
        self.listener(IncumbentFound(origin, per_sample_s, best.stages, best.devices, self._bounds()))

    def _tell_of_progress(self, round_: _Round, done: int, running: int) -> None:
        seconds = time.perf_counter() - round_.began_s
        threshold_s = round_.cutoff_s / self.microbatches
        self.listener(DegreesAdvanced(round_.index, threshold_s, done, round_.tasks, running, self._bounds(), seconds))

    def _tell_of_round(self, round_: _Round) -> None:
        seconds = time.perf_counter() - round_.began_s
        threshold_s = round_.cutoff_s / self.microbatches
        feasible = self.best is not None and self.upper_s <= round_.cutoff_s * (1.0 + TIE)
        self.listener(DegreesSearched(round_.index, threshold_s, feasible, round_.tasks, seconds, self._bounds()))


@dataclass(frozen=True)
class _Round:
    """tasks: how many there are. began_s: by ``time.perf_counter``."""

    index: int
    cutoff_s: float
    tasks: int
    began_s: float
