"""The walk along a frontier, from the most devices down: which positions are solved, what answers imply for others, and
the events of a frontier besides those of every solve.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol, TypeVar

from piper_ray.cost.tolerances import PROOF
from piper_ray.engine.ledger import status_of
from piper_ray.model.errors import ChoiceTooHard
from piper_ray.model.events import Event
from piper_ray.model.plan import Plan
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
