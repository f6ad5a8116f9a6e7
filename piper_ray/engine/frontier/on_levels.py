"""A frontier on a cluster whose nodes have faster links than those between them: of each size of group by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial

from piper_ray.cost.tolerances import PROOF
from piper_ray.engine.frontier.points import FrontierPoint
from piper_ray.engine.frontier.result import Frontier, Numbers
from piper_ray.engine.levels import instances, least_s, may_be_faster, status_of
from piper_ray.engine.several import better
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.plan import Plan
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import Schedule
from piper_ray.model.solution import Solution, SolveStats, Status
from piper_ray.model.stop import Stop, StoppedBy, StopSearch

FindFrontier = Callable[[Instance, Sequence[int], SolveOptions, Stop[Frontier]], Frontier]
"""On the instance's devices, for numbers that rise to these."""

_A_MOMENT_S = 1e-3


class LevelsFrontier(Frontier):
    """Of several levels: each answers for the numbers of devices above those of the level below it, and for more by its
    plans on all of its own. ``search`` finds it; until then, points say what is known of them.
    """

    def __init__(
        self,
        instance: Instance,
        devices: Sequence[int],
        restrictions: Restrictions,
        options: SolveOptions,
        schedule: Schedule,
        find: FindFrontier,
    ) -> None:
        super().__init__(instance, restrictions, options, schedule)
        self._devices, self._find = tuple(devices), find
        self._levels = instances(instance)
        self._parts: dict[int, Frontier] = {}

    def search(self, stop: Stop[Frontier]) -> None:
        """From the most devices down. Smaller levels whose work alone takes more are left out."""
        began_s = time.perf_counter()
        for level in reversed(range(len(self._levels))):
            wanted = list(self._own(level))
            more = [devices for devices in self._devices if devices > self._levels[level].devices]
            if more and self._helps(level, self._point(more[0]).time_per_sample_s):
                wanted.append(self._levels[level].devices)
            if not wanted:
                continue
            part = stop.part()
            stop.offer(partial(self._so_far, level, part))
            on, options = self._levels[level].replace(devices=wanted[-1]), self.options
            if options.time_limit_s is not None:
                left_s = options.time_limit_s - (time.perf_counter() - began_s)
                options = replace(options, time_limit_s=max(_A_MOMENT_S, left_s))
            try:
                if self._parts:
                    stop.check()
                self._know(level, self._find(on, sorted({*wanted}), options, part))
            except StopSearch as ended:
                if not self._parts:
                    raise
                self.stopped_by = ended.reason
            if self.stopped_by is StoppedBy.INTERRUPT:
                break
        stop.offer(lambda: self)

    def points(self) -> tuple[FrontierPoint, ...]:
        return _stepped([self._point(devices) for devices in self._devices])

    def budget_points(self, budgets: Numbers | None = None) -> tuple[FrontierPoint, ...]:
        last = len(self._levels) - 1
        found = list(self._parts[last].budget_points(budgets))
        for level in range(last):
            if not self._helps(level, _slowest_s(found)):
                continue
            size = self._levels[level].devices
            if level not in self._parts or size not in self._parts[level].by_devices():
                wanted = sorted({*self._own(level), size})
                self._parts[level] = self._find(self._levels[level], wanted, self.options, Stop())
            limit = self._levels[level].data_parallel_limit
            wanted = sorted({min(point.data_parallel_budget, limit) for point in found})
            known = {x.data_parallel_budget: x for x in self._parts[level].budget_points(wanted)}
            found = [_better_point(x, known[min(x.data_parallel_budget, limit)]) for x in found]
        return _stepped(found)

    @property
    def _positions(self) -> Sequence[int]:
        return self._devices

    def _plan_at(self, devices: int) -> Plan | None:
        return self._solution_at(devices).plan

    def _solution_at(self, devices: int) -> Solution:
        level = self._level_of(devices)
        found = self._parts[level].solution(devices) if level in self._parts else None
        for smaller in () if self.restrictions.all_devices else range(level):
            size = self._levels[smaller].devices
            if smaller in self._parts and size in self._parts[smaller].by_devices():
                other = self._parts[smaller].solution(size)
                found = other if found is None else better(found, other)
        point = self._point(devices)
        if found is None:
            return self._unknown(point.lower_bound_s)
        return replace(found, status=point.status, lower_bound_s=min(found.lower_bound_s, point.lower_bound_s))

    def _unknown(self, lower_s: float) -> Solution:
        """Of devices whose level was not searched, as the search was stopped."""
        stats = self.stats
        return Solution(
            Status.UNKNOWN,
            None,
            lower_s,
            None,
            SolveStats(
                layers=len(self.instance.layers),
                contracted_layers=stats.contracted_layers,
                downsets=stats.downsets,
                levels=stats.levels,
                pairs=None,
                threads=stats.threads,
                lattice_s=stats.preparation_s,
                stage_costs_s=0.0,
                search_s=stats.search_s,
                evaluations=(),
            ),
            stopped_by=self.stopped_by,
            schedule=self.schedule,
        )

    def _level_of(self, devices: int) -> int:
        return next(level for level, instance in enumerate(self._levels) if devices <= instance.devices)

    def _own(self, level: int) -> tuple[int, ...]:
        return tuple(devices for devices in self._devices if self._level_of(devices) == level)

    def _helps(self, level: int, value_s: float | None) -> bool:
        """Whether its plans may be faster than such a one of more devices."""
        return may_be_faster(self._levels[level], self.restrictions, value_s, self.options.gap)

    def _point(self, devices: int) -> FrontierPoint:
        """What the levels know of it, but for whether it is a step."""
        level = self._level_of(devices)
        found = FrontierPoint(devices, min(devices, self.instance.microbatches), Status.UNKNOWN, None, 0.0, False)
        if level in self._parts:
            found = next(point for point in self._parts[level].points() if point.devices == devices)
        for smaller in () if self.restrictions.all_devices else range(level):
            size = self._levels[smaller].devices
            known = self._parts[smaller].points() if smaller in self._parts else ()
            other = next((point for point in known if point.devices == size), None)
            if other is None:  # left out, or not searched yet
                other = replace(found, status=Status.UNKNOWN, time_per_sample_s=None)
                other = replace(other, lower_bound_s=least_s(self._levels[smaller]))
            if found.status is not Status.INFEASIBLE:
                found = _better_point(found, other)
        return found

    def _know(self, level: int, part: Frontier) -> None:
        self._parts[level] = part
        self.stopped_by = self.stopped_by or part.stopped_by
        self.reason = self.reason or part.reason
        self.chunks_differ = self.chunks_differ or part.chunks_differ
        self.by_solves = part.by_solves
        both = (self.stats, part.stats)
        self.stats = replace(
            part.stats,
            evaluations=sum(stats.evaluations for stats in both),
            preparation_s=sum(stats.preparation_s for stats in both),
            search_s=sum(stats.search_s for stats in both),
        )

    def _so_far(self, level: int, part: Stop[Frontier]) -> Frontier:
        known, found = copy(self), part.answer()
        known._parts = dict(self._parts)
        if found is not None:
            known._know(level, found)
        known.stopped_by = StoppedBy.INTERRUPT
        return known


def frontier_on_levels(
    instance: Instance,
    devices: Sequence[int],
    restrictions: Restrictions,
    options: SolveOptions,
    schedule: Schedule,
    find: FindFrontier,
    stop: Stop[Frontier],
) -> Frontier:
    """instance: at the most of ``devices``, which rise. find: makes the frontier of one level."""
    levels = instances(instance)
    if len(levels) == 1:
        return find(levels[0], devices, options, stop)
    found = LevelsFrontier(instance, devices, restrictions, options, schedule, find)
    found.search(stop)
    return found


def _slowest_s(points: Sequence[FrontierPoint]) -> float | None:
    """None if one has no plan."""
    found = [point.time_per_sample_s for point in points if point.time_per_sample_s is not None]
    return max(found) if len(found) == len(points) else None


def _better_point(one: FrontierPoint, other: FrontierPoint) -> FrontierPoint:
    """The better of two for the position of the first, with what both have proved."""
    values_s = [value_s for value_s in (one.time_per_sample_s, other.time_per_sample_s) if value_s is not None]
    value_s = min(values_s, default=None)
    lower_s = min(one.lower_bound_s, other.lower_bound_s, *values_s)
    ended = value_s is not None and {one.status, other.status} <= {Status.OPTIMAL, Status.INFEASIBLE}
    status = Status.OPTIMAL if ended else status_of(value_s, lower_s)
    return replace(one, time_per_sample_s=value_s, lower_bound_s=lower_s, status=status)


def _stepped(points: Sequence[FrontierPoint]) -> tuple[FrontierPoint, ...]:
    """With which of them take another time than the one before."""
    found: list[FrontierPoint] = []
    before_s: float | None = None
    for point in points:
        value_s = point.time_per_sample_s
        is_step = value_s is not None and (before_s is None or abs(value_s - before_s) > PROOF * before_s)
        found.append(replace(point, is_step=is_step))
        before_s = value_s
    return tuple(found)
