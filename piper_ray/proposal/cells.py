"""All plans that ``plan`` chooses from, divided into cells.

A cell holds plans that agree in all settings of a launch except d, t, p and the stages. One search goes through all
cells, the most promising first, and keeps one best plan. If a cell's bound shows that none of its plans is of interest,
the search skips the cell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import groupby
from types import MappingProxyType
from typing import Any, Protocol

from piper_ray.engine.flush.search import STATE_PASSES
from piper_ray.engine.ledger import Ledger, Limits, preference
from piper_ray.engine.one_setting import ModeSetting, Settings, changed, settings_of, together, worths_of
from piper_ray.engine.request import KeptSearches, Sought
from piper_ray.engine.solve import solve
from piper_ray.model.cluster import Cluster
from piper_ray.model.constraints import Constraint, Restrictions
from piper_ray.model.events import Event
from piper_ray.model.figures import size_text
from piper_ray.model.one_mode import OneMode
from piper_ray.model.options import SolveOptions
from piper_ray.model.schedule import CHUNKED, Schedule, ScheduleName, StepTerms
from piper_ray.model.solution import Solution, Status
from piper_ray.model.stop import Stop, StoppedBy, StopSearch
from piper_ray.proposal.demand import OVERLAPPED, PlanDemand, Proposed, uncollected
from piper_ray.proposal.each_pass import solve_each_pass
from piper_ray.proposal.layout_words import EACH_SITE
from piper_ray.simulate.run import SimulationOptions, simulate
from piper_ray.workloads.estimate.build import Estimate, with_state_on_host

CHUNKED_PASSES = 6_000_000_000
"""The most passes that all searches with chunks may simulate together: about 12 s of one core."""

_LEAST_PASSES = 100_000_000
"""The passes that each such search may simulate in any case, for a first bound and a quick plan."""

_KIND_PASSES = 1_000_000_000
"""The same on devices of several kinds, where all searches together may do ``_KIND_SHARE`` times as much."""

_KIND_SHARE = 3
_PAIR_PASSES = 1_000_000
"""The passes that a pair of degrees counts as on devices of several kinds. Its states are counted too."""

_FURTHER_PASSES = 500_000_000
FURTHER_GAP = 0.01
"""After the first round, the cell with the least bound gets this many more passes, while the bound of all is further
away than this: estimates are much less exact."""

_MORE = 3
"""On devices of several kinds it gets this many times as many."""

_STUCK_SHARE = 0.1
"""A cell on one kind gets no more passes after such a turn that closes less than this share of the gap between its
bound and the best plan."""

LISTED = 6
"""The search proves the best plan of each of this many best cells, which are all that the screen shows. Of the cells
with chunks it proves only those that are the best of all (``CellSearch.within_s``)."""

_WHOLE = "recomputation, sharding and sequence parallelism"
"""What cells of one ``Cell.whole`` differ in."""

RUNNERS_UP = 1.25
"""Plans that take longer than this factor times the best plan are of no interest."""

_GAP = 1e-4
_CHUNKED_GAP = 0.005
"""The gap at which the search of one cell ends."""


class Closing(str, Enum):
    """How a cell was closed.

    BOUND: its bound alone shows that none of its plans is of interest. SEARCHED: a search went through it; the cell has
    that search's bound. NO_PLAN: no plan fits. LEFT_OPEN: no search went through it.
    """

    BOUND = "bound"
    SEARCHED = "searched"
    NO_PLAN = "no plan"
    LEFT_OPEN = "left open"


@dataclass
class Cell:
    """Plans of one microbatch size, one schedule and one mode for all layers.

    restrictions: restrictions on the plans, besides the mode. on_host: the plans keep the optimizer's state in host
    memory, and the estimate does not. lower_s: no plan of the cell has a shorter step; inf: none fits. about_s: the
    step of a plan with equal stages. searched: whether a search went through the cell. passes: how many passes its
    search may simulate in all after another turn, if that can improve the bound. kept: that search, and simulated: its
    passes so far. whole: a cell whose layers may each run what any of several cells allows, so that its bounds hold for
    this one. found: the best known plan of the cell. closing: set at the end of the search.
    """

    samples: int
    schedule: ScheduleName
    estimate: Estimate
    setting: ModeSetting
    restrictions: Restrictions
    step: StepTerms
    lower_s: float
    about_s: float
    on_host: bool = False
    searched: bool = False
    passes: int = 0
    kept: KeptSearches = field(default_factory=KeptSearches)
    simulated: int = 0
    whole: Cell | None = None
    found: Proposed | None = None
    closing: Closing = Closing.LEFT_OPEN

    @classmethod
    def of_each(
        cls,
        settings: Sequence[ModeSetting],
        samples: int,
        schedule: ScheduleName,
        estimate: Estimate,
        restrictions: Restrictions,
        step: StepTerms,
        *,
        on_host: bool = False,
    ) -> list[Cell]:
        """A cell for each of these settings of the estimate's instance."""
        worths = worths_of(settings, restrictions, Schedule.first_of(schedule), step)
        all_s, given = estimate.instance.microbatches, (restrictions, step)
        return [
            cls(samples, schedule, estimate, one, *given, all_s * worth.least_s, all_s * worth.about_s, on_host)
            for one, worth in zip(settings, worths, strict=True)
        ]

    @property
    def priced_on_host(self) -> bool:
        """Whether its plans keep the optimizer's state in host memory."""
        model = self.estimate.instance.model
        return self.on_host or (model is not None and model.optimizer_on_host)

    @property
    def priced(self) -> Estimate:
        """The terms by which its plans are valued."""
        return self.estimate.on_host if self.on_host else self.estimate

    @property
    def microbatches(self) -> int:
        return self.estimate.instance.microbatches

    @property
    def has_kinds(self) -> bool:
        """Whether there are devices of several kinds."""
        return bool(self.estimate.instance.cluster.kinds)

    @property
    def allowed_gap(self) -> float:
        """The gap that the search of a cell may leave."""
        return _CHUNKED_GAP if self.schedule in CHUNKED else _GAP

    @property
    def may_rise(self) -> bool:
        """Whether further passes may improve its bound."""
        return bool(self.passes or (self.whole is not None and self.whole.passes))

    @property
    def text(self) -> str:
        where = ", optimizer state in host memory" if self.priced_on_host else ""
        where += f", {EACH_SITE}" if self.estimate.instance.cluster.sites else ""
        return f"microbatches of {self.samples}, {self.schedule.value}, {self.setting.text}{where}"


@dataclass(frozen=True)
class Cells:
    """cells: all cells except those that never beat another cell under any schedule. settings: microbatch sizes with
    the schedules and the modes of the kept and of the left-out cells. schedules: those of the cells. refused: what was
    not tried, and why. on_host: whether plans keep the optimizer's state in host memory; both values if both are
    tried."""

    cells: tuple[Cell, ...]
    settings: tuple[tuple[int, tuple[ScheduleName, ...], Settings], ...]
    schedules: tuple[ScheduleName, ...]
    refused: tuple[str, ...] = ()
    on_host: tuple[bool, ...] = (False,)

    @property
    def count(self) -> int:
        """The number of all combinations."""
        others = sum(len(schedules) * len(one.others) for _, schedules, one in self.settings)
        return len(self.cells) + len(self.on_host) * others

    @classmethod
    def of_ways(cls, ways: Sequence[Cells]) -> Cells:
        """The cells of several ways to place pipelines."""
        cells, settings, schedules, refused = (
            tuple(one for way in ways for one in getattr(way, name))
            for name in ("cells", "settings", "schedules", "refused")
        )
        return cls(cells, settings, tuple(dict.fromkeys(schedules)), tuple(dict.fromkeys(refused)), ways[0].on_host)

    def on(
        self, change: Callable[[Cluster], Cluster], *, roomier: bool = True, within_s: float = math.inf
    ) -> list[Cell]:
        """The same cells on another cluster, without those that are known to have no plan faster than ``within_s``.
        change: makes the cluster from the one that a cell is on.

        roomier: whether that cluster may have more of anything; then nothing is known. If it only has less memory, the
        cells' lower bounds still hold.
        """
        found = list[Cell]()
        for _, alike in groupby(self.cells, key=lambda one: (id(one.estimate), one.schedule, one.on_host)):
            before = [one for one in alike if roomier or one.lower_s < within_s]
            if not before:
                continue
            first = before[0]
            instance = first.estimate.instance.replace(cluster=change(first.estimate.instance.cluster))
            estimate, kinds = replace(first.estimate, instance=instance), replace(first.setting.kinds, whole=instance)
            settings = [replace(one.setting, kinds=kinds) for one in before]
            given = first.samples, first.schedule, estimate, first.restrictions, first.step
            now = Cell.of_each(settings, *given, on_host=first.on_host)
            if not roomier:
                for one, known in zip(now, before, strict=True):
                    one.lower_s = max(one.lower_s, known.lower_s)
            found += now
        return found


@uncollected()
def cells_of(
    demand: PlanDemand, estimates: Mapping[int, Estimate], known: Mapping[int, Settings] = MappingProxyType({})
) -> Cells:
    """known: the settings of estimates that differ only in their cluster, under the same rules. Raises UsageError for a
    model that the runtime does not know."""
    schedules, refused = list(demand.schedules), list[str]()
    alone = next(filter(None, (demand.runtime.on_one_rank(one.instance) for one in estimates.values())), None)
    if alone is not None:
        refused.append(f"{alone}; a config that does not tie them (tie_word_embeddings) has weights apart")
        refused += [
            f"{name.value}: not tried, as it is for several pipeline ranks" for name in schedules if name in CHUNKED
        ]
        schedules = [name for name in schedules if name not in CHUNKED]
    if demand.overlaps_experts and any(layer.experts for one in estimates.values() for layer in one.instance.layers):
        refused.append(OVERLAPPED)
    found, modes = list[Cell](), list[tuple[int, tuple[ScheduleName, ...], Settings]]()
    for samples, of_size in estimates.items():
        instance = of_size.instance
        rules = {name: demand.restrictions(instance, name) for name in schedules}
        if not rules:
            continue
        alike = known.get(samples)
        settings = settings_of(instance, next(iter(rules.values()))) if alike is None else alike.on(instance)
        modes.append((samples, tuple(schedules), settings))
        on_host = partial(with_state_on_host, setting=of_size.setting)
        hosted = changed(settings.worth_a_solve, on_host) if demand.tries_host else []
        for name, restrictions in rules.items():
            given = samples, name, of_size, restrictions.without(OneMode), demand.step
            found += Cell.of_each(settings.worth_a_solve, *given)
            found += Cell.of_each(hosted, *given, on_host=True)
    places = (False, True) if demand.tries_host else (bool(demand.request.optimizer_on_host),)
    return Cells(tuple(found), tuple(modes), tuple(schedules), tuple(refused), places)


@dataclass(frozen=True)
class CellBegun:
    """The search ``number``, from 1, of at most ``total``, for a batch of ``microbatches``.

    what: the cell in words ("microbatches of 4, 1f1b"). best_s: the best step so far; None if there is no plan.
    """

    number: int
    total: int
    what: str
    microbatches: int
    best_s: float | None


class Watch(Protocol):
    """Receives the beginning of each cell's search, and the events of that search."""

    def __call__(self, event: CellBegun | Event) -> None: ...


def unwatched(event: CellBegun | Event) -> None:
    """Ignores events."""


@dataclass(frozen=True)
class Extent:
    """How far a search goes.

    listed: the number of cells whose best plans are sought. passes: how many passes all searches with chunks may
    simulate; on several kinds a share of the work of all searches. bounded: whether the caller needs a bound for all
    cells; then each cell with chunks gets a bound even if no passes are left. near: plans that are faster by no more
    than this share are of no interest. threads: threads of each search without chunks; None: one for each core.
    """

    listed: int = LISTED
    passes: int = CHUNKED_PASSES
    bounded: bool = True
    near: float = 0.0
    threads: int | None = None


class CellSearch:
    """The rule that searches cells: first those without chunks, each in the order of its promise.

    known: plans that are known before the search, of these or other cells. found: the best plan of each cell and the
    known plans, the fastest first; each plan once (at t = 1 sequence parallelism changes nothing).
    """

    left_open: StoppedBy | None = None

    def __init__(
        self,
        demand: PlanDemand,
        cells: Sequence[Cell],
        stop: Stop[Any] | None = None,
        watch: Watch = unwatched,
        known: Iterable[Proposed] = (),
        extent: Extent | None = None,
    ) -> None:
        self.cells = sorted(cells, key=lambda one: (one.schedule in CHUNKED, one.about_s, one.lower_s))
        self._has_kinds = any(one.has_kinds for one in self.cells)
        self._demand, self._watch, self._extent = demand, watch, extent or Extent()
        self._passes_left = self._extent.passes * (_KIND_SHARE if self._has_kinds else 1)
        self._stop = Stop[Any]() if stop is None else stop
        self.ledger = Ledger[Proposed](limits=Limits(stop=self._stop), cases=dict(enumerate(self.cells)))
        self.found = tuple(sorted(known, key=preference))
        for one in self.found:
            self.ledger.begin_with(one)

    def run(self) -> None:
        """Searches all cells, or stops early if the caller wishes."""
        self.ledger.run(self)
        self.close_cells()
        for cell in self.cells:
            cell.kept, cell.whole = KeptSearches(), None

    def close_cells(self) -> None:
        """Sets how each cell was closed so far."""
        for cell in self.cells:
            cell.closing = self._closing(cell)

    def efforts(self) -> Generator[None, None, None]:
        """Searches one cell at a time. While passes are left, it then searches the cell with the least bound again,
        unless that bound would stay below all others after any further work."""
        for number, cell in enumerate(self.cells, start=1):
            if not self._is_of_interest(cell):
                continue
            if len(alike := self._alike(cell)) > 1:
                whole = replace(cell, setting=together([one.setting for one in alike]))
                whole.lower_s = min(one.lower_s for one in alike)
                whole.kept = KeptSearches(seeks=Sought.BOUND)
                for one in alike:
                    one.whole = whole
                self._begin(number, cell, of_all=True)
                yield
                if not self._is_of_interest(cell):
                    continue
            self._begin(number, cell)
            yield
        while self.cells and self._extent.bounded and self._may_go_on:
            least_s, number = min((cell.lower_s, number) for number, cell in enumerate(self.cells, start=1))
            cell = self.cells[number - 1]
            near = cell.allowed_gap if cell.has_kinds else FURTHER_GAP
            if not cell.may_rise or least_s >= self.ledger.upper_s * (1.0 - near):
                break
            self._begin(number, cell, of_all=cell.whole is not None and bool(cell.whole.passes))
            yield

    def _alike(self, cell: Cell) -> list[Cell]:
        """The cells with chunks that differ from this one only in recomputation, sharding and sequence parallelism, and
        were not searched, but may have plans of interest; none if a bound of all is known, or cannot be made."""
        if cell.schedule not in CHUNKED or cell.whole is not None or self._sums_each_pass or not self.found:
            return []
        key = cell.schedule, cell.on_host, id(cell.estimate), cell.setting.spread
        return [
            one
            for one in self.cells
            if (one.schedule, one.on_host, id(one.estimate)) == key[:3]
            and not one.searched
            and self._is_of_interest(one)
            and one.setting.spread == key[3]
        ]

    @property
    def _sums_each_pass(self) -> bool:
        """Whether the runtime may sum gradients in each pass, and the plans have to be priced so."""
        offer = self._demand.request.offer
        return self._demand.runtime.sums_each_pass and (bool(offer.sharded_over) or offer.fsdp > 1)

    @property
    def _may_go_on(self) -> bool:
        """Whether passes are left. On several kinds the search continues until there is some plan."""
        return self._passes_left > 0 or (self._has_kinds and not self.found)

    def _begin(self, number: int, cell: Cell, *, of_all: bool = False) -> None:
        """Searches a cell, or bounds all cells of its ``whole``."""
        best_s = None if self.ledger.best is None else self.ledger.upper_s
        like = f" and all like it but for {_WHOLE}" if of_all else ""
        self._watch(CellBegun(number, len(self.cells), f"{cell.text}{like}", cell.microbatches, best_s))
        if not of_all:
            self._go_through(cell)
            return
        assert cell.whole is not None
        solution = self._worked(cell.whole, self.within_s(cell))
        kept, more = cell.whole.kept, cell.whole.passes
        for one in self.cells:
            if one.whole is cell.whole:
                one.lower_s = max(one.lower_s, cell.whole.lower_s)
                if not one.searched:  # where a bound takes long, all of them wait for the common one
                    one.kept = kept.for_parts(Sought.PLAN if more else Sought.BOTH)
                elif not more:
                    one.kept, one.simulated, one.passes = kept.for_parts(Sought.BOTH), 0, _FURTHER_PASSES
        if solution.stopped_by is not None and solution.stopped_by.ends_all:
            raise StopSearch(solution.stopped_by)

    def within_s(self, cell: Cell) -> float:
        """The cutoff for a cell's plans: slower ones are of no interest. A cell with chunks, whose search takes much
        longer, has to beat all other plans; another cell only has to be listed."""
        if cell.schedule in CHUNKED:
            return self.ledger.upper_s * (1.0 - self._extent.near)
        steps_s = [one.step_s for one in self.found]
        last_s = steps_s[self._extent.listed - 1] if len(steps_s) >= self._extent.listed else math.inf
        return min(RUNNERS_UP * self.ledger.upper_s, last_s) * (1.0 - self._extent.near)

    def _is_of_interest(self, cell: Cell) -> bool:
        within_s = self.within_s(cell)
        if cell.schedule in CHUNKED and self._passes_left <= 0 and not self._extent.bounded:
            return False
        if cell.has_kinds and not self._may_go_on:
            return False
        under = cell.restrictions, Schedule.first_of(cell.schedule)
        if cell.lower_s < within_s < math.inf and not cell.setting.may_take(within_s / cell.microbatches, *under):
            cell.lower_s = within_s
        return cell.lower_s != math.inf and cell.lower_s < within_s

    def _worked(self, cell: Cell, within_s: float) -> Solution:
        """Gives a cell's search a turn."""
        least = _KIND_PASSES if cell.has_kinds else _LEAST_PASSES
        is_limited = cell.schedule in CHUNKED or cell.has_kinds
        wanted = cell.passes or least
        if self.found or not cell.has_kinds:
            wanted = max(least, min(wanted, cell.simulated + self._passes_left))
        limit = wanted if is_limited else None
        solution = self._solved(cell, within_s, limit)
        before_s, cell.lower_s = cell.lower_s, max(cell.lower_s, solution.lower_bound_s * cell.microbatches)
        if solution.stats.degrees is not None and limit is not None:
            degrees = solution.stats.degrees
            used = STATE_PASSES * degrees.states if cell.has_kinds else degrees.passes
            turn = used - cell.simulated
            self._passes_left -= turn + _PAIR_PASSES * degrees.pairs * cell.has_kinds
            hardly = within_s < math.inf and cell.lower_s - before_s < _STUCK_SHARE * (within_s - before_s)
            is_stuck = turn >= _FURTHER_PASSES and hardly and not cell.has_kinds
            more = _MORE * limit if cell.has_kinds else used + _FURTHER_PASSES
            cell.passes = more if used >= limit and not is_stuck else 0
            cell.simulated = used if cell.kept.searches else 0
        return solution

    def _go_through(self, cell: Cell) -> None:
        within_s = self.within_s(cell)
        solution, cell.searched = self._worked(cell, within_s), True
        if not cell.passes or not self._extent.bounded:
            cell.kept = KeptSearches()
        if solution.plan is not None:
            options = SimulationOptions.of(self._demand.step)
            simulation = simulate(cell.priced.instance, solution.plan, solution.schedule, options=options)
            found = Proposed(cell.samples, cell.priced, solution, solution.plan, simulation)
            if simulation.step_s <= within_s and self._demand.hosts_hold(found):
                self._take(found.as_run(self._demand.step), cell)
        if solution.stopped_by is not None and solution.stopped_by.ends_all:
            raise StopSearch(solution.stopped_by)

    def _take(self, found: Proposed, cell: Cell) -> None:
        others = [one for one in self.found if one is not cell.found]  # a cell that is gone through again has one plan
        cell.found = found
        if all(preference(found) < preference(one) for one in others if found.is_same(one)):
            others = [*(one for one in others if not found.is_same(one)), found]
        self.found = tuple(sorted(others, key=preference))
        self.ledger.offer(found, cell.text)

    def _solved(self, cell: Cell, within_s: float, passes: int | None) -> Solution:
        demand, chunked = self._demand, cell.schedule in CHUNKED

        def solved(further: tuple[Constraint, ...], sample_s: float | None) -> Solution:
            return solve(
                cell.setting.instance,
                restrictions=cell.restrictions.adding(*further),
                options=SolveOptions(
                    gap=cell.allowed_gap,
                    passes_limit=passes,
                    within_s=sample_s,
                    threads=1 if chunked else self._extent.threads,  # their programs hold Python's lock
                ),
                schedule=demand.scheduled(cell.schedule),
                listener=self._watch,
                step=demand.step,
                stop=self._stop.part(),
                kept=None if self._sums_each_pass else cell.kept,
            )

        sample_s = within_s / cell.microbatches
        if self._sums_each_pass:
            under = demand.scheduled(cell.schedule), demand.step
            return solve_each_pass(cell.setting, cell.restrictions, under, solved, sample_s)
        return solved((), None if sample_s == math.inf else sample_s)

    def _closing(self, cell: Cell) -> Closing:
        if cell.lower_s == math.inf:
            return Closing.NO_PLAN
        if cell.searched:
            return Closing.SEARCHED
        return Closing.BOUND if cell.lower_s >= self.within_s(cell) else Closing.LEFT_OPEN


def why_none(demand: PlanDemand, estimates: Mapping[int, Estimate], stop: Stop[Any]) -> list[str]:
    """Why even the smallest microbatches have no plan under any of the schedules, if no cell has one."""
    samples, of_size = next(iter(estimates.items()))
    instance, said = (of_size.on_host if demand.tries_host else of_size).instance, list[str]()
    for name in demand.schedules:
        rules = demand.restrictions(instance, name)
        found = solve(instance, restrictions=rules, schedule=name, step=demand.step, stop=stop.part())
        if found.status is Status.INFEASIBLE and found.infeasibility is not None:
            least_bytes = found.infeasibility.least_memory_bytes
            enough = "" if least_bytes is None else f"; {size_text(least_bytes)} would do"
            said.append(f"microbatches of {samples}, {name.value}: {found.infeasibility.reason}{enough}")
    return said
