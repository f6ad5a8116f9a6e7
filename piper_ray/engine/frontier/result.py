"""Optima along the number of devices, under any schedule. Some are computed when they are first requested.

Also rising numbers, also as texts of the command line: ``8..2048``, ``8..2048:8``, ``8,16,32``.

Also the walk along a frontier, from the most devices down: which positions are solved, what answers imply for others,
and the events of a frontier besides those of every solve.
"""

from __future__ import annotations

import math
import re
import time
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol, TypeVar

from piper_ray.cost.tolerances import PROOF
from piper_ray.engine.ledger import status_of
from piper_ray.model import arguments
from piper_ray.model.constraints import Restrictions
from piper_ray.model.errors import ChoiceTooHard, UsageError
from piper_ray.model.events import Event
from piper_ray.model.figures import html_table, percent_text, plural, relative_gap, time_text
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import Schedule
from piper_ray.model.solution import Solution, Status
from piper_ray.model.stop import Stop, StoppedBy, StopSearch

_WORTH_A_ROW_S = 1.0


@dataclass(frozen=True)
class CurveAdvanced:
    """``closed`` of ``points`` points are proved. by_sum: the points are bounds on the sum of d.

    >>> event = CurveAdvanced(by_sum=False, closed=3, points=8, evaluations=12, elapsed_s=1.5)
    >>> f"{event.closed} of {event.points} points"
    '3 of 8 points'
    """

    by_sum: bool
    closed: int
    points: int
    evaluations: int
    elapsed_s: float


@dataclass(frozen=True)
class PointClosed:
    """A point of a large lattice's curve is closed to within the gap. Bounds are in s, inf without a plan; evaluations:
    those made for it.

    >>> PointClosed(by_sum=False, position=8, lower_s=0.012, upper_s=0.012, evaluations=4, elapsed_s=0.5).position
    8
    """

    by_sum: bool
    position: int
    lower_s: float
    upper_s: float
    evaluations: int
    elapsed_s: float


class FrontierListener(Protocol):
    """Called with each event, in order, on the thread that called ``frontier``.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> seen = []
    >>> frontier = piper_ray.frontier(bert, devices="1..8", listener=seen.append, threads=1)
    >>> len(seen) > 0
    True
    """

    def __call__(self, event: Event | CurveAdvanced | PointClosed) -> None: ...


@dataclass
class Walk:
    """``run`` solves all ``positions``, which rise: numbers of devices or, if ``by_sum``, bounds on the sum of d.

    falling: whether a larger position never makes plans slower. solve: returns the answer at a position, and offers it
    to the Stop before. unknown: the answer for a position without a search. alike: positions with the same answer
    prefer the same plan if their value of this is equal; two positions with equal values have no other value between
    them. needed: the least position at which a plan is as good as at another.
    """

    positions: tuple[int, ...]
    by_sum: bool
    falling: bool
    solve: Callable[[int, Stop[Solution]], Solution]
    unknown: Callable[[int], Solution]
    alike: Callable[[int], Hashable]
    needed: Callable[[Plan, int], int]
    evaluations: int = 0
    seconds: float = 0.0
    preparation_s: float = 0.0
    stopped_by: StoppedBy | None = None
    _solved: dict[int, Solution] = field(default_factory=dict)
    _under_way: tuple[int, Stop[Solution]] | None = None
    _settled: dict[int, Solution] | None = None

    def run(self, listener: FrontierListener, stop: Stop[Any]) -> None:
        """Solves positions until all are solved, or until a limit or a request to stop."""
        began_s, index = time.perf_counter(), len(self.positions) - 1
        while index >= 0 and not _ends_all(self.stopped_by):
            position, part, since_s = self.positions[index], stop.part(), time.perf_counter()
            self._under_way = position, part
            try:
                found = self.solve(position, part)
            except StopSearch as ended:
                self.stopped_by = ended.reason
                break
            except ChoiceTooHard:
                self.stopped_by = StoppedBy.CHOICE_TOO_HARD
                break
            now_s = time.perf_counter()
            first = self._first_with(found, index)
            self._solved |= dict.fromkeys(self.positions[first : index + 1], found)
            self._under_way, index = None, first - 1
            evaluations = len(found.stats.evaluations) or 1
            self.evaluations += evaluations
            if _ends_all(found.stopped_by) or (found.stopped_by is not StoppedBy.GAP and self.stopped_by is None):
                self.stopped_by = found.stopped_by
            if now_s - since_s > _WORTH_A_ROW_S:
                value_s = math.inf if found.time_per_sample_s is None else found.time_per_sample_s
                bounds_s = found.lower_bound_s, value_s
                listener(PointClosed(self.by_sum, position, *bounds_s, evaluations, now_s - began_s))
            closed = len(self._solved)
            listener(CurveAdvanced(self.by_sum, closed, len(self.positions), self.evaluations, now_s - began_s))
        self.seconds, self._settled = time.perf_counter() - began_s, self._settle()

    def known(self) -> dict[int, Solution]:
        """Returns the best known plan and bound for each position; also to other threads."""
        return self._settle() if self._settled is None else self._settled

    def so_far(self) -> Walk:
        """Returns what is known at this moment, as if the walk ended now."""
        known = copy(self)
        known._settled, known.stopped_by = self.known(), StoppedBy.INTERRUPT
        return known

    def _first_with(self, found: Solution, index: int) -> int:
        """Returns the first position, up to this one, that has the same answer with the same plan."""
        if not self.falling:
            return index
        if found.plan is None:
            return 0 if found.status is Status.INFEASIBLE else index
        if found.status is not Status.OPTIMAL and found.stopped_by not in (
            StoppedBy.GAP,
            StoppedBy.NO_BETTER_BOUND,
        ):
            return index
        fits = bisect_left(
            self.positions, self.needed(found.plan.by_rank(found.schedule), self.positions[index]), hi=index
        )
        if fits == index:
            return index
        here = self.alike(self.positions[index])
        return bisect_left(self.positions, True, fits, index, key=lambda position: self.alike(position) == here)

    def _settle(self) -> dict[int, Solution]:
        """Returns the answers. If larger positions are never worse, bounds of larger and plans of smaller positions
        count too."""
        found, under_way = dict(self._solved), self._under_way
        if under_way is not None and under_way[0] not in found:
            so_far = under_way[1].answer()
            if so_far is not None:
                found[under_way[0]] = so_far
        found = {position: found.get(position) or self.unknown(position) for position in self.positions}
        if not self.falling:
            return found
        after = dict(pairwise(self.positions))
        return settled(found, lambda position: [after[position]] if position in after else [])


Place = TypeVar("Place", bound=Hashable)


def settled(found: Mapping[Place, Solution], next_of: Callable[[Place], Sequence[Place]]) -> dict[Place, Solution]:
    """Returns the answers with the bounds of larger places and the plans of smaller ones. found: rising. next_of: the
    next larger places."""
    known = dict(found)
    for place in reversed([*found]):
        known[place] = _bounded(known[place], max([known[x].lower_bound_s for x in (place, *next_of(place))]))
    for place in found:
        best = known[place]
        for more in next_of(place):
            here = known[more]
            if best.plan is not None and _is_faster(best, here):
                here = replace(here, plan=best.plan, time_per_sample_s=best.time_per_sample_s, schedule=best.schedule)
                known[more] = _bounded(here, here.lower_bound_s)
    return known


def _ends_all(reason: StoppedBy | None) -> bool:
    return reason is not None and reason.ends_all


def _is_faster(one: Solution, other: Solution) -> bool:
    if one.time_per_sample_s is None or other.time_per_sample_s is None:
        return one.time_per_sample_s is not None
    return one.time_per_sample_s < other.time_per_sample_s * (1.0 - PROOF)


def _bounded(found: Solution, lower_s: float) -> Solution:
    """Returns the answer with another bound, and the status that follows from both figures."""
    value_s = found.time_per_sample_s
    lower_s = lower_s if value_s is None else min(lower_s, value_s)
    status = status_of(math.inf if value_s is None else value_s, lower_s)
    if (lower_s, status) == (found.lower_bound_s, found.status):
        return found
    return replace(found, lower_bound_s=lower_s, status=status)


Numbers = Iterable[int] | str
"""Rising numbers, or a text such as "8..64" or "8,16,32"."""

_PART = re.compile(r"(\d+)(?:\.\.(\d+)(?::(\d+))?)?")
_MOST = 1_000_000


def rising(numbers: Numbers, name: str, what: str) -> tuple[int, ...]:
    """Returns the numbers; a text is read as on the command line. Raises UsageError unless they are positive, rising
    and not empty."""
    if isinstance(numbers, str):
        return parse_numbers(numbers, name)
    found = arguments.whole_numbers(name, numbers)
    if not found:
        raise UsageError(f"expected {what} at least")
    if found[0] < 1 or any(later <= earlier for earlier, later in pairwise(found)):
        raise UsageError(f"{what} must be 1 or more and above the one before it, not {found[0]}, ...")
    return found


def parse_numbers(text: str, option: str, least: int = 1) -> tuple[int, ...]:
    """Returns the numbers, each once and rising. A..B:STEP means A, A + STEP, ... up to B. Raises UsageError."""
    numbers: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise UsageError(f"{option} {text!r}: {part!r} is not a number or a range; expected 8,16,32 or 8..2048:8")
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if first < least or last < first or step < 1:
            raise UsageError(f"{option} {text!r}: {part!r} holds no numbers of {least} or more")
        if (last - first) // step >= _MOST:
            raise UsageError(f"{option} {text!r}: {part!r} holds more than a million numbers")
        numbers.update(range(first, last + 1, step))
    return tuple(sorted(numbers))


@dataclass(frozen=True)
class FrontierPoint:
    """The answer on ``devices`` devices with a sum of d of at most ``data_parallel_budget``.

    time_per_sample_s: None if there is no plan or none is known. lower_bound_s: no plan is faster; inf if there is
    none. is_step: whether it takes less time than the point before it on its curve.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> frontier = piper_ray.frontier(bert, devices="1..8", threads=1)
    >>> frontier.points()[-1].devices
    8
    """

    devices: int
    data_parallel_budget: int
    status: Status
    time_per_sample_s: float | None
    lower_bound_s: float
    is_step: bool

    @property
    def gap(self) -> float | None:
        """(time_per_sample_s - lower_bound_s) / time_per_sample_s."""
        if self.time_per_sample_s is None:
            return None
        return relative_gap(self.time_per_sample_s, self.lower_bound_s)


@dataclass(frozen=True)
class FrontierStats:
    """Figures of the lattice, threads, evaluations of all curves so far, and seconds.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> frontier = piper_ray.frontier(bert, devices="1..8", threads=1)
    >>> frontier.stats.downsets
    27
    """

    contracted_layers: int = 0
    downsets: int = 0
    levels: int = 0
    threads: int = 0
    evaluations: int = 0
    preparation_s: float = 0.0
    search_s: float = 0.0


class Frontier:
    """Optima along the number of devices and, under Piper's schedule, along the bound on the sum of d on all of them.

    instance: with the most devices requested. schedule: that of values and bounds. reason: why there is no plan at all,
    if that is known beforehand. chunks_differ: whether each solution has its own number of chunks on each rank.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> frontier = piper_ray.frontier(bert, devices="1..8", threads=1)
    >>> [point.devices for point in frontier.points() if point.is_step]
    [1, 2, 3, 4, 5, 6, 7, 8]
    """

    def __init__(
        self, instance: Instance, restrictions: Restrictions, options: SolveOptions, schedule: Schedule, walk: Walk
    ) -> None:
        self.instance, self.restrictions, self.options, self.schedule = instance, restrictions, options, schedule
        self.reason: str | None = None
        self.chunks_differ = False
        self.search_sums: Callable[[tuple[int, ...]], Walk] | None = None
        self._walk = walk
        self._budgets: dict[tuple[int, ...], Walk] = {}

    @property
    def stopped_by(self) -> StoppedBy | None:
        """Why a search ended early, if one did: then points that are not proved have a gap."""
        return next((walk.stopped_by for walk in self._walks if walk.stopped_by is not None), None)

    @property
    def by_solves(self) -> bool:
        """Whether ``stats`` counts solves, because they evaluate no thresholds."""
        return not any(found.stats.evaluations for found in self._walk.known().values())

    @property
    def stats(self) -> FrontierStats:
        """Figures of all solves so far."""
        found = [one.stats for one in self._walk.known().values()]
        preparation_s = sum(walk.preparation_s for walk in self._walks)
        return FrontierStats(
            contracted_layers=max(one.contracted_layers for one in found),
            downsets=max(one.downsets for one in found),
            levels=max(one.levels for one in found),
            threads=max(one.threads for one in found),
            evaluations=sum(walk.evaluations for walk in self._walks),
            preparation_s=preparation_s,
            search_s=sum(walk.seconds for walk in self._walks) - preparation_s,
        )

    @property
    def _walks(self) -> tuple[Walk, ...]:
        return (self._walk, *self._budgets.values())

    def so_far(self) -> Frontier:
        """Returns what is known at this moment, as if the search ended now; also to other threads."""
        known = copy(self)
        known._walk = self._walk.so_far()
        return known

    def __repr__(self) -> str:
        points = self.points()
        first, last = points[0].devices, points[-1].devices
        on = f"{first:,} devices" if first == last else f"{first:,} to {last:,} devices"
        steps = [point for point in points if point.is_step]
        text = f"Frontier({self.schedule.text}: {on}, {plural(len(points), 'point')}, {plural(len(steps), 'step')}; "
        if not steps:
            return f"{text}{self._without_plans})"
        best = steps[-1]
        assert best.time_per_sample_s is not None
        proved = sum(point.status in (Status.OPTIMAL, Status.INFEASIBLE) for point in points)
        return (
            f"{text}{time_text(best.time_per_sample_s)}/microbatch from {plural(best.devices, 'device')} on; "
            f"{proved:,} proved)"
        )

    def _repr_html_(self) -> str:
        steps = [point for point in self.points() if point.is_step]
        if not steps:
            return html_table(f"Frontier under {self.schedule.text}", [("plan", self._without_plans)])
        rows = [
            (
                f"{point.devices:,}",
                time_text(point.time_per_sample_s),
                "-" if point.gap is None else percent_text(point.gap),
            )
            for point in steps
            if point.time_per_sample_s is not None
        ]
        counted = f"{plural(len(steps), 'step')} over {plural(len(self.points()), 'number')} of devices"
        return html_table(
            f"Frontier under {self.schedule.text}: {counted}", rows, ("from devices", "time per microbatch", "gap")
        )

    @property
    def _without_plans(self) -> str:
        return self.reason or ("none known" if self.stopped_by is not None else "none fits")

    def points(self) -> tuple[FrontierPoint, ...]:
        """Returns the points by rising number of devices."""
        return _points(self._walk, [(k, min(k, self.instance.microbatches)) for k in self._walk.positions])

    def budget_points(self, budgets: Numbers | None = None) -> tuple[FrontierPoint, ...]:
        """Returns the points by rising bound on the sum of d. Raises UsageError for bounds above min(N, K), and if all
        stages have the same d."""
        if self.search_sums is None:
            raise UsageError("bounds on the sum of d are for plans whose stages may differ in d (schedule 2bw)")
        limit = self.instance.data_parallel_limit
        wanted = rising(range(1, limit + 1) if budgets is None else budgets, "budgets", "a bound on the sum of d")
        if wanted[-1] > limit:
            raise UsageError(f"no plan's data-parallel degrees may sum to more than min(N, K) = {limit}")
        if wanted not in self._budgets:
            self._budgets[wanted] = self.search_sums(wanted)
        return _points(self._budgets[wanted], [(self.instance.devices, s) for s in wanted])

    def by_devices(self) -> dict[int, float | None]:
        """Returns {K: least time per sample in s}, with None if no plan fits or none is known."""
        return {point.devices: point.time_per_sample_s for point in self.points()}

    def by_budget(self, budgets: Numbers | None = None) -> dict[int, float | None]:
        """Returns {bound on the sum of d: least time per sample in s} on all devices of the instance.

        budgets: rising, or a text such as "8..64"; None: every bound up to min(N, K). Computed at the first call.
        """
        return {point.data_parallel_budget: point.time_per_sample_s for point in self.budget_points(budgets)}

    def plan(self, devices: int) -> Plan | None:
        """Returns the plan that ``solve`` finds on ``devices`` devices: least time, then fewest devices, then fewest
        stages.

        None if no plan is known. Raises UsageError for a number of devices that was not requested.
        """
        return self.solution(devices).plan

    def solution(self, devices: int) -> Solution:
        """Returns the solution that ``solve`` finds on ``devices`` devices, or on fewer if more are of no use.

        Raises UsageError as ``plan`` does.
        """
        wanted = arguments.whole(devices)
        if wanted is None:
            raise UsageError(f"devices must be a whole number, not {arguments.shown(devices)}")
        if wanted not in self._walk.positions:
            raise UsageError(f"the frontier was not asked for {wanted} devices")
        return self._walk.known()[wanted]


def _points(walk: Walk, limits: Iterable[tuple[int, int]]) -> tuple[FrontierPoint, ...]:
    """Returns the points of a walk. limits: the devices and the bound on the sum of d of each position."""
    points: list[FrontierPoint] = []
    before_s: float | None = None
    for (devices, budget), found in zip(limits, walk.known().values(), strict=True):
        value_s = found.time_per_sample_s
        is_step = value_s is not None and (before_s is None or abs(value_s - before_s) > PROOF * before_s)
        points.append(FrontierPoint(devices, budget, found.status, value_s, found.lower_bound_s, is_step))
        before_s = value_s
    return tuple(points)
