"""Optima along the number of devices, under any schedule. Some are computed when they are first requested."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass

from piper_ray.cost.tolerances import PROOF
from piper_ray.engine.frontier.ranges import Numbers, rising
from piper_ray.engine.frontier.walk import Walk
from piper_ray.model import arguments
from piper_ray.model.errors import UsageError
from piper_ray.model.fields import renamed
from piper_ray.model.figures import html_table, percent_text, plural, relative_gap, time_text
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.plan import Plan
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import Schedule
from piper_ray.model.solution import Solution, Status
from piper_ray.model.stop import StoppedBy


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

    time_per_sample = renamed("time_per_sample", "time_per_sample_s")
    lower_bound = renamed("lower_bound", "lower_bound_s")

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
