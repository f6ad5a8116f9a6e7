"""What a search knows at every moment: its best plan, what is proved of each case, and whether it is to end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np

from piper_ray.cost.tolerances import PROOF
from piper_ray.engine.search.limits import Limits
from piper_ray.model.events import Bounds, IncumbentFound, Listener, silent
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import Schedule
from piper_ray.model.solution import Infeasibility, Solution, SolveStats, Status
from piper_ray.model.step import StepTerms
from piper_ray.model.stop import StoppedBy

TIE = 1e-12
"""Relative: plans whose batches differ by no more take the same but for rounding."""


NO_PLAN_FITS = Infeasibility("no plan fits", None)


class FoundPlan(Protocol):
    """A plan as a search has it. batch_s: simulated. rank: of plans that take the same the least is preferred."""

    @property
    def batch_s(self) -> float: ...

    @property
    def devices(self) -> int: ...

    @property
    def stages(self) -> int: ...

    @property
    def rank(self) -> tuple[int, ...]: ...


class OpenCase(Protocol):
    """Some of the plans. lower_s: proved, and only rises: none of them takes less a batch."""

    lower_s: float


@dataclass
class NothingProved:
    """All plans, of which nobody has looked at any."""

    lower_s: float = 0.0


P = TypeVar("P", bound=FoundPlan)


def preference(found: FoundPlan) -> tuple[float, ...]:
    """The least is the best: in time, then in devices and what else ``rank`` has."""
    return (found.batch_s, *found.rank)


@dataclass
class Ledger(Generic[P]):
    """Valid at every moment, for other threads too. Its times are those of a batch, but for events and limits, which
    have those of a microbatch: ``optimizer_s`` more over ``microbatches``.

    started_s: what events count from, by ``time.perf_counter``. cases: those that hold all plans; a new mapping
    whenever there are others. best: to begin with. whole: of a search of some of the plans only, the ledger of all,
    which gets them. found: all that were offered, in turn.
    """

    microbatches: int
    limits: Limits = field(default_factory=Limits)
    listener: Listener = silent
    started_s: float = field(default_factory=time.perf_counter)
    optimizer_s: float = 0.0
    cases: Mapping[int, OpenCase] = field(default_factory=dict)
    best: P | None = None
    whole: Ledger[P] | None = None
    found: list[P] = field(default_factory=list)
    stopped_by: StoppedBy | None = None

    @property
    def upper_s(self) -> float:
        """Of the best plan known; inf if there is none."""
        return np.inf if self.best is None else self.best.batch_s

    @property
    def lower_s(self) -> float:
        """No plan takes less. inf: there is no plan."""
        return min([self.upper_s, *(case.lower_s for case in self.cases.values())])

    @property
    def within_s(self) -> float:
        """Slower plans are of no interest."""
        return self.limits.within_s * self.microbatches

    @property
    def proved(self) -> bool:
        """Whether no plan is faster than the best one, or there is none."""
        return self.beaten_from_s <= self.lower_s

    @property
    def beaten_from_s(self) -> float:
        """A plan that takes as much is no better than the best one, but for rounding."""
        return self.upper_s * (1.0 - PROOF)

    def sample_s(self, batch_s: float) -> float:
        """What a microbatch takes then, with its part of the optimizer."""
        return (batch_s + self.optimizer_s) / self.microbatches

    def begin_with(self, known: P) -> None:
        """A plan of another search, of which nobody is told."""
        if self._is_preferred(known):
            self.best = known

    def offer(self, found: P, origin: str) -> None:
        """Keeps it if it is preferred to the best one; the listener hears of a faster one. origin: what found it."""
        if self.whole is not None:
            self.whole.offer(found, origin)
            self.best = self.whole.best
            return
        self.found.append(found)
        before_s = self.upper_s
        if not self._is_preferred(found):
            return
        self.best = found
        if found.batch_s < before_s * (1.0 - TIE):
            value_s = self.sample_s(found.batch_s)
            self.listener(IncumbentFound(origin, value_s, found.stages, found.devices, self.bounds()))

    def _is_preferred(self, found: P) -> bool:
        best = self.best
        if best is None or found.batch_s < best.batch_s * (1.0 - TIE):
            return True
        return found.batch_s <= best.batch_s * (1.0 + TIE) and found.rank < best.rank

    def bounds(self) -> Bounds:
        """As events tell them."""
        upper_s = None if self.best is None else self.sample_s(self.upper_s)
        return Bounds(self.sample_s(self.lower_s), upper_s, time.perf_counter() - self.started_s)

    def answer(
        self,
        plan_of: Callable[[P], Plan],
        schedule_of: Callable[[P | None], Schedule],
        stats: SolveStats,
        step: StepTerms,
        left_open: StoppedBy | None = None,
        infeasibility: Infeasibility = NO_PLAN_FITS,
    ) -> Solution:
        """What is known now. left_open: why the bound is not met, where the search ended by itself. infeasibility: why
        there is no plan, where there is none."""
        best, lower_s = self.best, self.lower_s
        proved = self.proved
        status = Status.OPTIMAL if proved else Status.FEASIBLE
        if best is None:
            status = Status.INFEASIBLE if proved else Status.UNKNOWN
        return Solution(
            status=status,
            time_per_sample_s=None if best is None else self.sample_s(best.batch_s),
            lower_bound_s=self.sample_s(lower_s),
            plan=None if best is None else plan_of(best),
            stats=stats,
            infeasibility=infeasibility if status is Status.INFEASIBLE else None,
            stopped_by=None if proved else self.stopped_by or left_open,
            schedule=schedule_of(best),
            step=step,
        )

    def ends(self) -> bool:
        """Whether a wish to stop, the deadline, or that no plan left is as fast as asked ends the search."""
        if self.stopped_by is None:
            self.stopped_by = self.limits.reached
        if self.stopped_by is None and self.upper_s > self.lower_s > self.within_s:
            self.stopped_by = StoppedBy.TOO_SLOW
        return self.stopped_by is not None

    def is_near(self, wanted_s: float) -> bool:
        """Whether the bound is within the gap of a time that is wanted, which ends the search, too."""
        near = self.lower_s >= wanted_s * (1.0 - self.limits.gap) and np.isfinite(wanted_s) and not self.proved
        if self.stopped_by is None and near:
            self.stopped_by = StoppedBy.GAP
        return self.stopped_by is not None
