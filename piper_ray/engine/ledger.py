"""How a search ends under any schedule, and how a ``Solution`` is made of what it has found.

A search consists of a *rule*, which makes efforts one after the other, and a *ledger*, which keeps what they find. The
loop runs the rule's next effort until none is left or the ledger ends the search.
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
"""Relative. Plans whose batches differ by no more count as equally fast: the difference is rounding."""


NO_PLAN_FITS = Infeasibility("no plan fits", None)


@dataclass(frozen=True)
class Limits:
    """What ends a search before its proof.

    gap: relative, between the best plan and the bound. deadline_s: on the clock of ``time.perf_counter``. stop: the
    user's request. within_s: time per sample; a search ends once no plan can be that fast. passes: the largest number
    of passes that a search may simulate.
    """

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
        """Whether nothing but the user's request ends the search before its proof."""
        return self.gap == 0.0 and self.deadline_s is None and self.within_s == self.passes == math.inf

    @property
    def reached(self) -> StoppedBy | None:
        """INTERRUPT after the user's request, TIME_LIMIT after the deadline, else None."""
        if self.stop.requested:
            return StoppedBy.INTERRUPT
        late = self.deadline_s is not None and time.perf_counter() > self.deadline_s
        return StoppedBy.TIME_LIMIT if late else None

    def check(self) -> None:
        """Raises StopSearch if the user asks to stop or the deadline has passed."""
        reached = self.reached
        if reached is not None:
            raise StopSearch(reached)


class FoundPlan(Protocol):
    """A plan found by a search.

    value_s: the time that the search minimises. rank: the plan of least rank is preferred among equally fast ones.
    """

    @property
    def value_s(self) -> float: ...

    @property
    def devices(self) -> int: ...

    @property
    def stages(self) -> int: ...

    @property
    def rank(self) -> tuple[float, ...]: ...


class OpenCase(Protocol):
    """A set of plans with a proved bound. lower_s: no plan of the set takes less; inf: the set is empty. It only
    rises."""

    @property
    def lower_s(self) -> float: ...


@dataclass(frozen=True)
class Bounded:
    """A case of which nothing but a bound is known."""

    lower_s: float = 0.0


class Rule(Protocol):
    """Decides which efforts a search makes, in which order. It offers the plans it finds to its ledger and sets its
    cases."""

    def efforts(self) -> Generator[None, None, None]:
        """Makes one effort between two yields.

        If it is closed early, it keeps what it has found. If an effort raises StopSearch or KeyboardInterrupt, the
        search ends with an answer from what is known; any other exception is passed on.
        """
        ...

    @property
    def left_open(self) -> StoppedBy | None:
        """Why no effort is left although the bound is below the best plan."""
        ...


P = TypeVar("P", bound=FoundPlan)


def preference(found: FoundPlan) -> tuple[float, ...]:
    """A key for sorting, best first: by time, then by ``rank``."""
    return (found.value_s, *found.rank)


@dataclass
class Ledger(Generic[P]):
    """What a search knows. Its answer is valid at every moment, also when another thread reads it.

    Times in the ledger are of a batch of ``microbatches`` (of one microbatch under 2bw). Events, limits and answers use
    the time of one microbatch: the sum of that time and ``optimizer_s``, divided by ``microbatches``.

    started_s: events count from here, on the clock of ``time.perf_counter``. cases: together they hold all plans; a
    change of the cases is a new mapping. passes: the number simulated so far. best: the best plan. whole: the ledger of
    the whole search, if this one searches only some of the plans; plans are passed on to it. may_prefer: whether the
    search goes on after the proof, to find the preferred one among equally fast plans. left_open: why no effort was
    left. ended: whether no effort was left or the search was stopped.
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
        """The time of the best plan known; inf if there is none."""
        return np.inf if self.best is None else self.best.value_s

    @property
    def lower_s(self) -> float:
        """The proved bound: no plan takes less, up to rounding. inf: there is no plan."""
        lower_s = min((case.lower_s for case in self.cases.values()), default=np.inf)
        # Among equally fast plans the preferred one may take longer, by rounding, than the one found first.
        return self.upper_s if lower_s >= self.upper_s * (1.0 - TIE) else lower_s

    @property
    def within_s(self) -> float:
        """The limit on a batch without the optimizer: the search ends once no plan is that fast. A little more than
        what is asked for, as the times of plans and bounds are rounded."""
        batch_s = self.limits.within_s * self.microbatches
        return batch_s * (1.0 + TIE) - self.optimizer_s

    @property
    def proved(self) -> bool:
        """Whether no plan is faster than the best one, or there is none."""
        return self.beaten_from_s <= self.lower_s

    @property
    def beaten_from_s(self) -> float:
        """The time from which on a plan does not beat the best one."""
        return self.upper_s * (1.0 - PROOF)

    def go_on(self, limits: Limits) -> None:
        """Lets a search that ended run once more, with other limits."""
        self.limits, self.stopped_by = limits, None

    def sample_s(self, value_s: float) -> float:
        """Returns the time of one microbatch with its share of the optimizer, if a batch takes ``value_s``."""
        return (value_s + self.optimizer_s) / self.microbatches

    def begin_with(self, known: P) -> None:
        """Takes a plan that another search found, without an event."""
        if self._is_preferred(known):
            self.best = known

    def offer(self, found: P, origin: str) -> None:
        """Keeps the plan if it is preferred to the best one. If it is faster, an event reports it, with ``origin``."""
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
        """Both bounds and the elapsed time, as events report them."""
        upper_s = None if self.best is None else self.sample_s(self.upper_s)
        return Bounds(self.sample_s(self.lower_s), upper_s, time.perf_counter() - self.started_s)

    def settle(self, found: P) -> None:
        """Replaces the best plan by ``found``, the preferred one among equally fast plans."""
        self.best, self.may_prefer = found, False

    def ends(self) -> bool:
        """Whether the search ends: by the user's request, at the deadline, at its limit of work, or because no plan can
        be within the limit on time. Sets ``stopped_by``."""
        if self.stopped_by is None:
            self.stopped_by = self.limits.reached
        if self.stopped_by is None and self.passes >= self.limits.passes:
            self.stopped_by = StoppedBy.WORK_LIMIT
        within_s = self.within_s
        if self.stopped_by is None and self.upper_s > within_s and self.upper_s > self.lower_s > within_s:
            self.stopped_by = StoppedBy.TOO_SLOW
        return self.stopped_by is not None

    def check(self, done: int = 0) -> None:  # noqa: ARG002 - called as a listener of progress
        """Called within a long effort: raises StopSearch if the search is to end."""
        if self.ends():
            assert self.stopped_by is not None
            raise StopSearch(self.stopped_by)

    def is_near(self, wanted_s: float) -> bool:
        """Whether the search has ended. Ends it with GAP if the bound is within the gap of ``wanted_s``."""
        near = self.lower_s >= wanted_s * (1.0 - self.limits.gap) and np.isfinite(wanted_s) and not self.proved
        if self.stopped_by is None and near:
            self.stopped_by = StoppedBy.GAP
        return self.stopped_by is not None

    def run(self, rule: Rule) -> None:
        """The loop: runs efforts until none is left or a limit, the user's request or KeyboardInterrupt ends it."""
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
        """Makes the solution from what is known now. infeasibility: the reason to give if there is no plan."""
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
    """A group of efforts that events report together.

    index: from 1. count: the number of efforts. threshold_s: the largest time that their plans may take; None: the time
    of the best plan known. began_s: on the clock of ``time.perf_counter``.
    """

    ledger: Ledger[Any]
    index: int
    count: int
    threshold_s: float | None = None
    began_s: float = field(default_factory=time.perf_counter)

    @property
    def _sample_s(self) -> float:
        return self.ledger.sample_s(self.ledger.upper_s if self.threshold_s is None else self.threshold_s)

    def tell_of_progress(self, done: int, running: int) -> None:
        """Reports how many of the efforts are done and how many are running."""
        ledger, seconds = self.ledger, time.perf_counter() - self.began_s
        bounds = ledger.bounds()
        ledger.listener(DegreesAdvanced(self.index, self._sample_s, done, self.count, running, bounds, seconds))

    def tell_of_end(self) -> None:
        """Reports whether a plan within the threshold is known."""
        ledger, seconds = self.ledger, time.perf_counter() - self.began_s
        within_s = np.inf if self.threshold_s is None else self.threshold_s * (1.0 + TIE)
        feasible = ledger.best is not None and ledger.upper_s <= within_s
        ledger.listener(DegreesSearched(self.index, self._sample_s, feasible, self.count, seconds, ledger.bounds()))


def status_of(upper_s: float, lower_s: float) -> Status:
    """Returns the status for the best plan's time (inf: there is none) and a bound that holds for all plans."""
    if upper_s == math.inf:
        return Status.INFEASIBLE if lower_s == math.inf else Status.UNKNOWN
    return Status.OPTIMAL if lower_s >= upper_s * (1.0 - PROOF) else Status.FEASIBLE


def no_plan(
    infeasibility: Infeasibility | None,
    stats: SolveStats,
    schedule: Schedule = PAPERS_SCHEDULE,
    step: StepTerms = StepTerms(),
) -> Solution:
    """Returns the answer for a problem that was proved infeasible without a search."""
    return Solution(Status.INFEASIBLE, None, float("inf"), None, stats, infeasibility, schedule=schedule, step=step)


def stats_of_nothing(instance: Instance, contracted_layers: int = 0) -> SolveStats:
    """The stats of a solve that has done nothing yet."""
    return SolveStats(len(instance.layers), contracted_layers, 0, 0, None, 0, 0.0, 0.0, 0.0, ())


def no_search(lower_s: float, stats: SolveStats, schedule: Schedule) -> Solution:
    """Returns the answer before a search: no plan is known, and none takes less than ``lower_s`` for a microbatch."""
    return Solution(Status.UNKNOWN, None, lower_s, None, stats, schedule=schedule)


class Inexact(LimitError):
    """Raised if figures differ so much in size that their sums are too inexact. found: the evidence, in words."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"sums of the layers' figures are not exact enough: {found}. Leave out configurations that no plan can "
            "use, whose figures are a hundred million times as large as others' and more"
        )


@contextmanager
def keeping_known(ledger: Ledger[Any], forget_bounds: Callable[[], None]) -> Iterator[None]:
    """Ends the search with the best plan known, in place of two errors: ChoiceTooHard and Inexact.

    They are raised if no plan is known. forget_bounds: drops the bounds that came from inexact sums.
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
