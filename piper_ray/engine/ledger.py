"""How a search ends, whatever the schedule, and how a ``Solution`` is made of what it has found.

A search is a *rule* that makes efforts, one after the other, and a *ledger* that has what they have found. The loop
makes the rule's next effort until it has no other, or the ledger says that the search ends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from piper_ray.cost.tolerances import PROOF
from piper_ray.model.errors import ChoiceTooHard, LimitError
from piper_ray.model.events import Bounds, DegreesAdvanced, DegreesSearched, IncumbentFound, Listener, Note, silent
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule, StepTerms
from piper_ray.model.solution import Infeasibility, Solution, SolveStats, Status
from piper_ray.model.stop import Stop, StoppedBy, StopSearch

TIE = 1e-12
"""Relative: plans whose batches differ by no more take the same but for rounding."""


NO_PLAN_FITS = Infeasibility("no plan fits", None)


@dataclass(frozen=True)
class Limits:
    """gap: relative, between the best plan and the lower bound. deadline_s: by ``time.perf_counter``. stop: a wish.
    within_s: time per sample; a search ends once no plan keeps within it. passes: that a search may simulate."""

    gap: float = 0.0
    deadline_s: float | None = None
    stop: Stop[Any] = field(default_factory=Stop)
    within_s: float = math.inf
    passes: float = math.inf

    @classmethod
    def of(cls, options: SolveOptions, started_s: float, stop: Stop[Any]) -> Limits:
        """started_s: what the time limit counts from, by ``time.perf_counter``."""
        limit_s = options.time_limit_s
        within_s = math.inf if options.within_s is None else options.within_s
        passes = math.inf if options.passes_limit is None else options.passes_limit
        return cls(options.gap, None if limit_s is None else started_s + limit_s, stop, within_s, passes)

    @property
    def are_none(self) -> bool:
        """Whether only a wish ends the search before its proof."""
        return self.gap == 0.0 and self.deadline_s is None and self.within_s == self.passes == math.inf

    @property
    def reached(self) -> StoppedBy | None:
        """INTERRUPT where it is asked to stop, TIME_LIMIT where the deadline is over, else None."""
        if self.stop.requested:
            return StoppedBy.INTERRUPT
        late = self.deadline_s is not None and time.perf_counter() > self.deadline_s
        return StoppedBy.TIME_LIMIT if late else None

    def check(self) -> None:
        """Raises StopSearch where ``reached``."""
        reached = self.reached
        if reached is not None:
            raise StopSearch(reached)


class FoundPlan(Protocol):
    """A plan as a search has it. value_s: the time that the search minimises. rank: of plans that take the same the
    least is preferred."""

    @property
    def value_s(self) -> float: ...

    @property
    def devices(self) -> int: ...

    @property
    def stages(self) -> int: ...

    @property
    def rank(self) -> tuple[float, ...]: ...


class OpenCase(Protocol):
    """Some of the plans. lower_s: proved, and only rises: none of them takes less. inf: there is none."""

    @property
    def lower_s(self) -> float: ...


@dataclass(frozen=True)
class Bounded:
    """Plans of which no more is known than a bound."""

    lower_s: float = 0.0


class Rule(Protocol):
    """Which efforts a search makes, in which order. It offers what they find to its ledger, whose cases are its own."""

    def efforts(self) -> Generator[None, None, None]:
        """Makes them, each between two yields; where it is closed early it takes in what there is. What an effort
        raises ends the search: StopSearch and KeyboardInterrupt with what is known, anything else without.
        """
        ...

    @property
    def left_open(self) -> StoppedBy | None:
        """Why no effort is left, where the bound is not met."""
        ...


P = TypeVar("P", bound=FoundPlan)


def preference(found: FoundPlan) -> tuple[float, ...]:
    """The least is the best: in time, then in devices and what else ``rank`` has."""
    return (found.value_s, *found.rank)


@dataclass
class Ledger(Generic[P]):
    """Valid at every moment, for other threads too. Its times are those of ``microbatches`` (a batch; under 2bw one),
    but for events, limits and answers, which have those of one: ``optimizer_s`` more over ``microbatches``.

    started_s: what events count from, by ``time.perf_counter``. cases: those that hold all plans; a new mapping
    whenever there are others. passes: simulated so far. best: to begin with. whole: of a search of some of the plans
    only, the ledger of all, which gets them. may_prefer: whether a search goes on after the proof, to the plan that is
    preferred among those that take the same. left_open: why the search had no effort left; ended: it had none, or was
    stopped.
    """

    microbatches: int = 1
    limits: Limits = field(default_factory=Limits)
    listener: Listener = silent
    started_s: float = field(default_factory=time.perf_counter)
    optimizer_s: float = 0.0
    cases: Mapping[int, OpenCase] = field(default_factory=lambda: {0: Bounded()})
    passes: int = 0
    best: P | None = None
    whole: Ledger[P] | None = None
    may_prefer: bool = False
    stopped_by: StoppedBy | None = None
    left_open: StoppedBy | None = None
    ended: bool = False

    @property
    def upper_s(self) -> float:
        """Of the best plan known; inf if there is none."""
        return np.inf if self.best is None else self.best.value_s

    @property
    def lower_s(self) -> float:
        """No plan takes less, but for rounding. inf: there is no plan."""
        lower_s = min((case.lower_s for case in self.cases.values()), default=np.inf)
        # Of plans that take the same, one is kept that may take longer by a last bit than the one that was found first.
        return self.upper_s if lower_s >= self.upper_s * (1.0 - TIE) else lower_s

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

    def sample_s(self, value_s: float) -> float:
        """What a microbatch takes then, with its part of the optimizer."""
        return (value_s + self.optimizer_s) / self.microbatches

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
        before_s = self.upper_s
        if not self._is_preferred(found):
            return
        self.best = found
        if found.value_s < before_s * (1.0 - TIE):
            value_s = self.sample_s(found.value_s)
            self.listener(IncumbentFound(origin, value_s, found.stages, found.devices, self.bounds()))

    def _is_preferred(self, found: P) -> bool:
        best = self.best
        if best is None or found.value_s < best.value_s * (1.0 - TIE):
            return True
        return found.value_s <= best.value_s * (1.0 + TIE) and found.rank < best.rank

    def bounds(self) -> Bounds:
        """As events tell them."""
        upper_s = None if self.best is None else self.sample_s(self.upper_s)
        return Bounds(self.sample_s(self.lower_s), upper_s, time.perf_counter() - self.started_s)

    def settle(self, found: P) -> None:
        """The plan preferred among those that take as little as the best one, but for rounding."""
        self.best, self.may_prefer = found, False

    def ends(self) -> bool:
        """Whether the search ends: by a wish to stop, the deadline, its work, or as no plan left is as fast as asked.
        Sets ``stopped_by``."""
        if self.stopped_by is None:
            self.stopped_by = self.limits.reached
        if self.stopped_by is None and self.passes >= self.limits.passes:
            self.stopped_by = StoppedBy.WORK_LIMIT
        if self.stopped_by is None and self.upper_s > self.lower_s > self.within_s:
            self.stopped_by = StoppedBy.TOO_SLOW
        return self.stopped_by is not None

    def check(self, done: int = 0) -> None:  # noqa: ARG002 - as progress that nobody is told of
        """Raises StopSearch where the search ends, to end a long effort."""
        if self.ends():
            assert self.stopped_by is not None
            raise StopSearch(self.stopped_by)

    def is_near(self, wanted_s: float) -> bool:
        """Ends the search, with GAP as ``stopped_by``, where the bound is within the gap of a time that is wanted.
        Whether it has ended, by that or before."""
        near = self.lower_s >= wanted_s * (1.0 - self.limits.gap) and np.isfinite(wanted_s) and not self.proved
        if self.stopped_by is None and near:
            self.stopped_by = StoppedBy.GAP
        return self.stopped_by is not None

    def run(self, rule: Rule) -> None:
        """The loop: efforts until none is left, or until a limit, a wish to stop, or KeyboardInterrupt comes first."""
        self.ended = False
        try:
            with closing(rule.efforts()) as efforts:
                while not self.ends() and next(efforts, _NONE_LEFT) is not _NONE_LEFT:
                    pass
        except StopSearch as stop:
            self.stopped_by = stop.reason
        except KeyboardInterrupt:
            self.stopped_by = StoppedBy.INTERRUPT
        self.left_open, self.ended = rule.left_open, True

    def answer(
        self,
        plan_of: Callable[[P], Plan],
        schedule_of: Callable[[P | None], Schedule],
        stats: SolveStats,
        step: StepTerms = StepTerms(),
        infeasibility: Infeasibility | None = NO_PLAN_FITS,
    ) -> Solution:
        """What is known now. infeasibility: why there is no plan, where there is none."""
        best, lower_s = self.best, self.lower_s
        status = status_of(self.upper_s, lower_s)
        reason = self.stopped_by or (self.left_open if self.ended else StoppedBy.INTERRUPT)
        is_all = status is Status.INFEASIBLE or (status is Status.OPTIMAL and not self.may_prefer)
        return Solution(
            status=status,
            time_per_sample_s=None if best is None else self.sample_s(best.value_s),
            lower_bound_s=self.sample_s(lower_s),
            plan=None if best is None else plan_of(best),
            stats=stats,
            infeasibility=infeasibility if status is Status.INFEASIBLE else None,
            stopped_by=None if is_all else reason,
            schedule=schedule_of(best),
            step=step,
        )


_NONE_LEFT = object()


@dataclass(frozen=True)
class Round:
    """Some of a search's efforts, as events tell of them. index: from 1. count: how many; threshold_s: what their plans
    are to take at most; None: no more than the best one known. began_s: by ``time.perf_counter``."""

    ledger: Ledger[Any]
    index: int
    count: int
    threshold_s: float | None = None
    began_s: float = field(default_factory=time.perf_counter)

    @property
    def _sample_s(self) -> float:
        return self.ledger.sample_s(self.ledger.upper_s if self.threshold_s is None else self.threshold_s)

    def tell_of_progress(self, done: int, running: int) -> None:
        """done, running: of its efforts."""
        ledger, seconds = self.ledger, time.perf_counter() - self.began_s
        bounds = ledger.bounds()
        ledger.listener(DegreesAdvanced(self.index, self._sample_s, done, self.count, running, bounds, seconds))

    def tell_of_end(self) -> None:
        """feasible: whether a plan is known that takes no more than the threshold, but for rounding."""
        ledger, seconds = self.ledger, time.perf_counter() - self.began_s
        within_s = np.inf if self.threshold_s is None else self.threshold_s * (1.0 + TIE)
        feasible = ledger.best is not None and ledger.upper_s <= within_s
        ledger.listener(DegreesSearched(self.index, self._sample_s, feasible, self.count, seconds, ledger.bounds()))


def status_of(upper_s: float, lower_s: float) -> Status:
    """Of the best plan's time, inf if there is none, and a bound for all plans."""
    if upper_s == math.inf:
        return Status.INFEASIBLE if lower_s == math.inf else Status.UNKNOWN
    return Status.OPTIMAL if lower_s >= upper_s * (1.0 - PROOF) else Status.FEASIBLE


def no_plan(
    infeasibility: Infeasibility | None,
    stats: SolveStats,
    schedule: Schedule = PAPERS_SCHEDULE,
    step: StepTerms = StepTerms(),
) -> Solution:
    """Proved without a search."""
    return Solution(Status.INFEASIBLE, None, float("inf"), None, stats, infeasibility, schedule=schedule, step=step)


def stats_of_nothing(instance: Instance, contracted_layers: int = 0) -> SolveStats:
    """Of a solve that has done nothing yet."""
    return SolveStats(len(instance.layers), contracted_layers, 0, 0, None, 0, 0.0, 0.0, 0.0, ())


def no_search(lower_s: float, stats: SolveStats, schedule: Schedule) -> Solution:
    """Before a search, of which nothing is known but that no plan takes less for a microbatch than ``lower_s``."""
    return Solution(Status.UNKNOWN, None, lower_s, None, stats, schedule=schedule)


class Inexact(LimitError):
    """found: what shows it, in words."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"sums of the layers' figures are not exact enough: {found}. Leave out configurations that no plan can "
            "use, whose figures are a hundred million times as large as others' and more"
        )


@contextmanager
def keeping_known(ledger: Ledger[Any], forget_bounds: Callable[[], None]) -> Iterator[None]:
    """A TMPC choice that is too hard to make exactly, or figures too far apart for sums, end the search with the plan
    that is known. Without one they are errors, which it raises. forget_bounds: those that came out of sums.
    """
    try:
        yield
    except ChoiceTooHard as error:
        if ledger.best is None:
            raise
        raise StopSearch(StoppedBy.CHOICE_TOO_HARD) from error
    except Inexact as error:
        if ledger.best is None:
            raise
        forget_bounds()
        ledger.listener(Note(str(error)))
        raise StopSearch(StoppedBy.INEXACT) from error
