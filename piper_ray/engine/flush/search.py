"""The search over all (d, t): rounds of tasks at rising times, with a bound that holds at every moment.

Its result does not depend on the number of workers. While a task runs, it receives the values of plans that other tasks
find. A task that nevertheless stays open is tried again once the best plan of the others is known. If the search may
end within a round, by its gap or because no plan is fast enough, results count in the order of the tasks, and no task
uses the plan of a later one.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from piper_ray.engine.backends.calls import Workers
from piper_ray.engine.flush.space import SearchSpace
from piper_ray.engine.flush.stand_ins import StandIns
from piper_ray.engine.flush.tables import FlushWorkload
from piper_ray.engine.flush.task_search import PROOFS, ChosenStages, TaskEffort, TaskMemo, TaskResult, call_of
from piper_ray.engine.flush.tasks import DegreePair
from piper_ray.engine.ledger import TIE, Ledger, Round
from piper_ray.model.stop import StoppedBy

FIRST_SHARE = 0.005
_LARGE_SHARE = 4.0
"""Plans are first sought up to this share above the bound. It doubles each round; beyond the second, any plan will
do."""
_STEP, _LEAST_STEP = 0.03, 0.01
"""The largest share on a large lattice or with several kinds of devices, once a plan is known: the number of states
grows steeply with the time that plans may take. The least one after a round that made it grow steeply."""
_ROUGH = 1.3
"""A plan is rough if its time exceeds the bound by more than this factor: then steps are as long as without a plan."""
_FIRST_STEP = 0.04
"""The largest share of the first round after bounds of listed downsets: half of what these mostly leave."""
_FEW_STATES, _STEEP = 1_000, 4.0
"""Rounds with at most this number of states are cheap. If the states grow by at least this factor in one round, the
next step is shorter."""
_CAREFUL_STEP, _CAREFUL_ROUNDS = 0.06, 16
"""With several kinds and no plan known: the largest share, and the number of rounds for which it holds."""
_FEW_TASKS = 2
"""This many tasks are searched without bounds by the cheapest borders, because these bounds take about as long."""
STATE_PASSES = 500
"""What a state counts as, in passes of a simulation: see ``SolveOptions.passes_limit``."""
_LOOK_S = 0.05
"""Seconds between two checks of the limits."""


Degrees = tuple[int, ...]
"""d, then t on each kind of devices."""


@dataclass
class FlushSearch:
    """The rule of a search over all (d, t). It keeps ``ledger``.

    proved_s: bounds known beforehand, by (d, t): no plan of the task takes less. origin: what finds the plans, for
    events. effort: made for each task; if only an early plan is sought, bounds need not meet plans. first_share: plans
    are first sought up to this share above the bound.
    """

    space: SearchSpace
    tasks: Sequence[DegreePair]
    workers: Workers
    ledger: Ledger[ChosenStages]
    proved_s: Mapping[Degrees, float] = field(default_factory=dict)
    memo: TaskMemo | None = None
    origin: str = "search"
    effort: TaskEffort = TaskEffort.PROOF
    first_share: float = FIRST_SHARE

    def __post_init__(self) -> None:
        self.states = 0
        self.found: list[ChosenStages] = []  # in order, with those from chain and beams
        self._began_s = time.perf_counter()
        self._ended_s: float | None = None
        self._bound_s = np.inf  # plans must take less
        self._bounded_s: float | None = None  # the time at which all tasks have bounds
        self._stand_ins_of: dict[int, StandIns | None] = {}  # by variant
        self._in_order = False  # whether results count in the tasks' order
        self._cases = {
            task.order: _Case(task, max(task.lower_s, self.proved_s.get(task.degrees, 0.0))) for task in self.tasks
        }
        self.ledger.cases = self._cases

    @property
    def searched(self) -> int:
        """The number of tasks that no bound ruled out."""
        return sum(case.searched for case in self._cases.values())

    @property
    def looked_through(self) -> int:
        """The number of tasks whose plans were enumerated one by one."""
        return sum(case.looked_through for case in self._cases.values())

    @property
    def left_open(self) -> StoppedBy | None:
        """Why the search ended by itself with a bound below the best plan; else None."""
        beaten_s = self.ledger.beaten_from_s
        reasons = (case.left_open for case in self._cases.values() if case.lower_s < beaten_s)
        return next(filter(None, reasons), None)

    @property
    def seconds(self) -> float:
        """Seconds from the creation of the search to its end."""
        return (time.perf_counter() if self._ended_s is None else self._ended_s) - self._began_s

    def proved_of_tasks(self) -> dict[Degrees, float]:
        """Returns ``proved_s`` for a later search whose plans are some of these."""
        cases = sorted(self._cases.values(), key=lambda case: case.lower_s, reverse=True)
        return {case.task.degrees: case.lower_s for case in cases}

    def add(self, other: FlushSearch) -> None:
        """Adds the work of another search for some of the same plans."""
        self.states += other.states
        for mine, theirs in zip(self._cases.values(), other._cases.values(), strict=False):
            mine.searched |= theirs.searched
            mine.looked_through |= theirs.looked_through

    def fit(self) -> None:
        """Seeks plans that fit in memory, whatever their time; or proves that a task has none."""
        self._run_before(FlushSearch(self.space, self.tasks, self.workers, self._part(), effort=TaskEffort.FIT))

    def bound(self, workload: FlushWorkload) -> None:
        """Computes bounds of all open tasks by the cheapest borders of ``workload``, at the best plan's time if there
        is one: first a quick bound of each, then closer ones, of the task of the lowest bound first. Does nothing if a
        plan is known and only a few tasks are open, or if they have bounds at this time."""
        upper_s = self.ledger.upper_s
        if upper_s == self._bounded_s or (upper_s < np.inf and len(self._open_below(upper_s)) <= _FEW_TASKS):
            return
        self._bounded_s = upper_s
        for effort in (TaskEffort.QUICK_BOUND, TaskEffort.BOUND) if upper_s < np.inf else (TaskEffort.BOUND,):
            tasks = sorted(self._open_below(upper_s), key=lambda task: (task.lower_s, task.order))
            tasks = [task for task in tasks if task.lower_s < upper_s]
            known = [replace(x, borders=None if x.has_kinds else workload.borders(x.arrays.bounding)) for x in tasks]
            if effort is TaskEffort.BOUND and upper_s < np.inf:
                known = [replace(x, stand_ins=self._stand_ins(x)) for x in known]
            if self.ledger.stopped_by is None:
                self._run_before(FlushSearch(self.space, known, self.workers, self._part(), effort=effort))

    def _stand_ins(self, task: DegreePair) -> StandIns | None:
        """Returns borders that stand in for others in a task; None if they are not used."""
        variants, space = task.arrays.variants, self.space
        if space.graph is not None or not space.has_many_layers or task.has_kinds or variants.size > 1:
            return None
        variant = int(variants[0])
        if variant not in self._stand_ins_of:
            rates = [float(x.arrays.sync_s_per_byte[variant]) for x in self.tasks if variant in x.arrays.variants]
            self._stand_ins_of[variant] = StandIns.of_tables(space.tables, variant, max(rates))
        return self._stand_ins_of[variant]

    def improve(self, space: SearchSpace, tasks: Sequence[DegreePair], origin: str, first_share: float) -> None:
        """Looks for an early plan on fewer downsets. Keeps the bounds that hold for all plans of a task."""
        effort = TaskEffort.PLAN
        self._run_before(
            FlushSearch(space, tasks, self.workers, self._part(), {}, None, origin, effort, first_share=first_share)
        )

    def _part(self) -> Ledger[ChosenStages]:
        ledger = self.ledger
        return Ledger(ledger.microbatches, ledger.limits, best=ledger.best, whole=ledger)

    def _run_before(self, search: FlushSearch) -> None:
        """Runs another search of the same tasks. The two pass each other what is proved of them."""
        ledger, some = self.ledger, search.ledger
        mine = {case.task.key: case for case in self._cases.values()}
        theirs = {case.task.key: case for case in search._cases.values()}
        both = [(mine[key], theirs[key]) for key in mine.keys() & theirs.keys()]
        for known, case in both:
            case.learn(known)
        some.run(search)
        if some.stopped_by is not None and some.stopped_by.ends_all:
            ledger.stopped_by = some.stopped_by
        self.found += search.found
        for case, found in both:
            case.learn(found)
            if search.space is self.space:  # of the same plans
                case.lower_s = max(case.lower_s, found.lower_s)

    def efforts(self) -> Generator[None, None, None]:
        """Seeks plans that take hardly more than the bound, then ever more. So few plans slower than the best one are
        looked at, and plans that a round does not find are proved not to exist.
        """
        ledger, share, index, before = self.ledger, self.first_share, 0, 0
        has_kinds = any(task.has_kinds for task in self.tasks)
        try:
            if self.effort in (TaskEffort.FIT, TaskEffort.QUICK_BOUND, TaskEffort.BOUND):
                tasks = self._open_below(ledger.upper_s)
                yield from self._seek(tasks, ledger.upper_s, Round(ledger, 1, len(tasks), ledger.upper_s), self.effort)
                return
            soon = [task for task in self.tasks if self.space.is_large and self.space.is_soon_bounded(task)]
            if soon and ledger.upper_s not in (np.inf, self._bounded_s) and not self._is_near():
                index += 1
                round_ = Round(ledger, index, len(soon), ledger.upper_s)
                yield from self._seek(soon, ledger.upper_s, round_, TaskEffort.BOUND)
            if ledger.upper_s == self._bounded_s and self.space.graph is None and ledger.lower_s > 0.0:
                # Listing the stages of plans takes about as long at each time, so few times are tried.
                share = max(share, min(_FIRST_STEP, 0.5 * (ledger.upper_s / ledger.lower_s - 1.0)))
            while self.tasks and not self._is_near():
                index += 1
                upper_s, lower_s, states = ledger.upper_s, ledger.lower_s, self.states
                cutoff_s = min(upper_s, lower_s * (1.0 + share))
                tasks = self._open_below(cutoff_s * (1.0 + TIE))
                round_ = Round(ledger, index, len(tasks), cutoff_s)
                yield from self._seek(tasks, cutoff_s, round_, self.effort)
                if ledger.stopped_by is None:
                    round_.tell_of_end()
                if ledger.proved or cutoff_s >= upper_s:
                    break
                share = 2.0 * share if share < _LARGE_SHARE else np.inf
                # Where a plan is found, the number of states may depend on when workers hear of it.
                few, before = before, self.states - states if ledger.upper_s == upper_s else before
                # A step that does not raise the bound, such as one from 0, is not repeated.
                rose = lower_s < cutoff_s <= ledger.lower_s * (1.0 + TIE)
                if rose and (self.space.is_large or has_kinds) and ledger.upper_s <= _ROUGH * ledger.lower_s:
                    is_steep = before > _STEEP * max(few, _FEW_STATES)
                    share = min(share, max(share / 4.0, _LEAST_STEP) if is_steep else _STEP)
                elif rose and has_kinds and index < _CAREFUL_ROUNDS:
                    share = min(share, _CAREFUL_STEP)
        finally:
            self._ended_s = time.perf_counter()

    def _open_below(self, most_s: float) -> list[DegreePair]:
        """Returns the tasks that may have plans of at most ``most_s``, each with the bound that is known of it now. One
        that was left open at the same time is not tried again."""
        cases = [case for case in self._cases.values() if case.lower_s <= most_s and not case.was_left_at(most_s)]
        return [replace(case.task, lower_s=case.lower_s) for case in cases]

    def _is_near(self) -> bool:
        return self.ledger.is_near(self.ledger.upper_s)

    def _seek(
        self, tasks: Sequence[DegreePair], cutoff_s: float, round_: Round, effort: TaskEffort
    ) -> Generator[None, None, None]:
        """Runs one round: seeks plans of at most ``cutoff_s``, or only bounds on them. Tasks of very many states come
        last, after bounds on all of these."""
        self._bound_s, limits = cutoff_s, self.ledger.limits
        may_end = limits.gap > 0.0 or min(limits.within_s, limits.passes) < np.inf
        for one in PROOFS if effort is TaskEffort.PROOF else (effort,):
            again = yield from self._go_through(tasks, cutoff_s, round_, one, in_order=may_end)
            late = [outcome.task for outcome in again]
            yield from self._go_through(late, self._bound_s, round_, one, in_order=True, before=again)
            cases = [self._cases[task.order] for task in tasks]
            tasks = [replace(case.task, lower_s=case.lower_s) for case in cases if case.is_rounded]

    def _go_through(
        self,
        tasks: Sequence[DegreePair],
        most_s: float,
        round_: Round,
        effort: TaskEffort,
        *,
        in_order: bool,
        before: Sequence[_Outcome] = (),
    ) -> Generator[None, None, list[_Outcome]]:
        """Seeks plans of at most ``most_s`` for each task.

        Returns the outcomes of tasks that are left open although a better plan is known now than when they began. They
        do not count, because they may depend on when the tasks received that plan, unless a limit ends the search
        before the tasks have been tried again. before: such outcomes of these tasks.
        """
        workers, waiting, left = self.workers, deque(tasks), deque(task.order for task in tasks)
        known_s = self.ledger.upper_s
        memo = self.memo if effort in (TaskEffort.PLAN, *PROOFS) else None
        self._in_order, running = in_order, 0
        ready: dict[int, _Outcome] = {}
        left_open: list[_Outcome] = []
        try:
            while left and not self._is_near():
                while waiting and running < workers.width and self._may_begin(waiting[0], left, ready):
                    task = waiting.popleft()
                    known = None if memo is None else memo.result(task, most_s)
                    if known is not None:
                        ready[task.order] = _Outcome(task, known)
                        break
                    workers.give(call_of(self.space, task, self._bound_s, effort, known_s))
                    running += 1
                round_.tell_of_progress(round_.count - len(waiting) - running, running)
                for finished in workers.done(_LOOK_S if self._next(left, ready) is None else 0.0):
                    running -= 1
                    task, began_with_s = finished.call.key, finished.call.bound_s
                    ready[task.order] = _Outcome(task, finished.result, began_with_s)
                if not in_order:
                    self._lower_bound(workers.heard_s())
                while (order := self._next(left, ready)) is not None and not self._is_near():
                    outcome = ready.pop(order)
                    is_late = outcome.result.left_open is not None and outcome.began_with_s > self._bound_s
                    if in_order and is_late:
                        waiting.appendleft(outcome.task)
                        break
                    left.remove(order)
                    if outcome.result.left_open is not None and not in_order:
                        left_open.append(outcome)
                    else:
                        self._count(outcome, most_s, memo)
                    yield
                yield
        finally:
            recalled = [_Outcome(finished.call.key, finished.result) for finished in workers.recall()]
            if (reason := self.ledger.stopped_by) is None or reason.ends_all:
                tried = () if reason is None else before
                for outcome in (*ready.values(), *recalled, *((*tried, *left_open) if left else ())):
                    self._take(outcome.task, outcome.result)
        best_s = self._bound_s  # counting one that found a plan lowers the bound
        for outcome in left_open:
            if outcome.began_with_s <= best_s:
                self._count(outcome, most_s, memo)
        return [outcome for outcome in left_open if outcome.began_with_s > best_s]

    def _next(self, left: Sequence[int], ready: Mapping[int, _Outcome]) -> int | None:
        """Returns the order of the task whose outcome counts next; None if that is not ready."""
        order = left[0] if self._in_order and left else next(iter(ready), None)
        return order if order in ready else None

    def _may_begin(self, task: DegreePair, left: Sequence[int], ready: Mapping[int, _Outcome]) -> bool:
        """Whether the task should begin. The number of outcomes that wait for the next one to count is limited."""
        return task.order == left[0] or len(ready) < 2 * self.workers.width

    def _count(self, outcome: _Outcome, most_s: float, memo: TaskMemo | None) -> None:
        proved_s = self._take(outcome.task, outcome.result)
        if memo is not None and outcome.began_with_s > 0.0 and not outcome.result.is_rounded:
            memo.record(outcome.task, most_s, replace(outcome.result, lower_s=proved_s))

    def _lower_bound(self, bound_s: float) -> None:
        if bound_s < self._bound_s:
            self._bound_s = bound_s
            if not self._in_order:
                self.workers.tell(bound_s)

    def _take(self, task: DegreePair, result: TaskResult) -> float:
        """Records a task's result. Returns the bound for all plans of the task: no batch takes less, in s."""
        case = self._cases[task.order]
        self.states += result.states
        self.ledger.passes += STATE_PASSES * result.states
        case.searched |= result.states > 0
        case.looked_through |= result.looked_through
        if result.found is not None:
            self._lower_bound(result.found.value_s)
        # The bound holds for plans below the time that the task had to beat, which was never less than it is now.
        proved_s = min(result.lower_s, self._bound_s)
        case.proved_s = max(case.proved_s, result.proved_s, 0.0 if result.prices is None else result.prices.bound_s)
        case.task = replace(case.task, prices=result.prices or case.task.prices)
        case.lower_s, case.is_rounded = max(case.lower_s, proved_s, case.proved_s), result.is_rounded
        if result.left_open is not None:
            case.left_open, case.left_s = result.left_open, self._bound_s
        if result.found is not None:
            self.found.append(result.found)
            self.ledger.offer(result.found, self.origin)
        return proved_s


@dataclass(frozen=True)
class _Outcome:
    """The outcome of a task. began_with_s: the time that its plans had to beat at first; 0: read from the memo."""

    task: DegreePair
    result: TaskResult
    began_with_s: float = 0.0


@dataclass
class _Case:
    """A task with what is known of it.

    lower_s: the bound for its plans on the search's downsets. proved_s: the bound for all of its plans. left_open: why
    its bound could not be met. left_s: the time that its plans had to beat then. is_rounded: as in ``TaskResult``.
    """

    task: DegreePair
    lower_s: float
    proved_s: float = 0.0
    searched: bool = False
    looked_through: bool = False
    left_open: StoppedBy | None = None
    left_s: float = 0.0
    is_rounded: bool = False

    def was_left_at(self, most_s: float) -> bool:
        """Whether the task was left open by a search for plans of at most about as long."""
        return self.left_open is not None and math.isclose(self.left_s, most_s, rel_tol=4.0 * TIE)

    def learn(self, other: _Case) -> None:
        """Takes over the bounds that another search has proved for all plans of the same task."""
        self.proved_s = max(self.proved_s, other.proved_s)
        self.lower_s = max(self.lower_s, other.proved_s)
        self.task = replace(self.task, prices=other.task.prices or self.task.prices)
