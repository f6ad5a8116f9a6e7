"""A frontier by single solves, from the most devices down: what one proves the next ones take up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Protocol

from piper_ray.cost.tolerances import PROOF
from piper_ray.engine.frontier.curve_events import CurveAdvanced, FrontierListener, PointClosed
from piper_ray.engine.frontier.points import FrontierPoint, FrontierStats
from piper_ray.engine.frontier.result import Frontier, Numbers
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.plan import Plan
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import Schedule
from piper_ray.model.solution import Solution, Status
from piper_ray.model.stop import Stop, StoppedBy

_ENDING = (StoppedBy.INTERRUPT, StoppedBy.TIME_LIMIT)
_WORTH_A_ROW_S = 1.0


class PointSolver(Protocol):
    """Solves one number of devices after the other, each with what it knows from those before."""

    def solve(self, devices: int) -> Solution:
        """As ``solve`` on so many devices."""
        ...

    def so_far(self, devices: int) -> Solution:
        """What is known of them at this moment, for other threads too: of the solve under way, or of those before."""
        ...

    @property
    def stats(self) -> FrontierStats:
        """Figures of all solves so far."""
        ...


class WalkedFrontier(Frontier):
    """``walk`` finds it. Until then, and where it ends early, points say what is known of them."""

    by_solves = True

    def __init__(
        self,
        instance: Instance,
        devices: Sequence[int],
        restrictions: Restrictions,
        options: SolveOptions,
        schedule: Schedule,
        solver: PointSolver,
    ) -> None:
        super().__init__(instance, restrictions, options, schedule)
        self._devices = tuple(devices)
        self._solver = solver
        # More devices never hurt: what is proved of some holds for fewer, and their plans for more.
        self._falling = not restrictions.all_devices
        self._solved: dict[int, Solution] = {}
        self._settled: dict[int, Solution] | None = None

    def walk(self, listener: FrontierListener, stop: Stop[Frontier]) -> None:
        """Solves the points, or ends early as the solver does. stop: is offered the frontier so far."""
        began_s = time.perf_counter()
        stop.offer(self._so_far)
        above: Solution | None = None
        for devices in reversed(self._devices):
            if above is None or not self._holds_for(above, devices):
                since_s = time.perf_counter()
                above = self._solver.solve(devices)
                self.stats = self._solver.stats
                ended = above.stopped_by in _ENDING
                if ended or (above.stopped_by not in (None, StoppedBy.GAP) and self.stopped_by is None):
                    self.stopped_by = above.stopped_by
                if time.perf_counter() - since_s > _WORTH_A_ROW_S:
                    listener(_closed(devices, above, time.perf_counter() - began_s))
            self._solved[devices], self._settled = above, None
            closed, searches = len(self._solved), self.stats.evaluations
            listener(CurveAdvanced(False, closed, len(self._devices), searches, time.perf_counter() - began_s))
            if above.stopped_by in _ENDING:
                break

    def points(self) -> tuple[FrontierPoint, ...]:
        points: list[FrontierPoint] = []
        before_s: float | None = None
        for devices in self._devices:
            found = self._solution_at(devices)
            value_s = found.time_per_sample_s
            is_step = value_s is not None and (before_s is None or abs(value_s - before_s) > PROOF * before_s)
            budget = min(devices, self.instance.microbatches)
            points.append(FrontierPoint(devices, budget, found.status, value_s, found.lower_bound_s, is_step))
            before_s = value_s
        return tuple(points)

    def budget_points(self, budgets: Numbers | None = None) -> tuple[FrontierPoint, ...]:  # noqa: ARG002
        raise UsageError("bounds on the sum of d are for plans whose stages may differ in d (schedule 2bw)")

    @property
    def _positions(self) -> Sequence[int]:
        return self._devices

    def _plan_at(self, devices: int) -> Plan | None:
        return self._solution_at(devices).plan

    def _solution_at(self, devices: int) -> Solution:
        if self._settled is None:
            self._settled = self._settle()
        return self._settled[devices]

    def _settle(self) -> dict[int, Solution]:
        """All points. Where more devices never hurt, bounds of more and plans of fewer count too."""
        found = {devices: self._solved.get(devices) or self._solver.so_far(devices) for devices in self._devices}
        if not self._falling:
            return found
        lower_s = 0.0
        for devices in reversed(self._devices):
            lower_s = max(lower_s, found[devices].lower_bound_s)
            found[devices] = _bounded(found[devices], lower_s)
        best: Solution | None = None
        for devices in self._devices:
            here = found[devices]
            if best is not None and _is_faster(best, here):
                here = replace(here, plan=best.plan, time_per_sample_s=best.time_per_sample_s, schedule=best.schedule)
                found[devices] = _bounded(here, here.lower_bound_s)
            best = found[devices] if here.plan is not None else best
        return found

    def _holds_for(self, above: Solution, devices: int) -> bool:
        """Whether the answer on more devices is that on these."""
        if not self._falling:
            return False
        if above.plan is None:
            return above.status is Status.INFEASIBLE
        ended = above.status is Status.OPTIMAL or above.stopped_by in (StoppedBy.GAP, StoppedBy.NO_BETTER_BOUND)
        return ended and above.plan.by_rank(above.schedule).devices <= devices

    def _so_far(self) -> Frontier:
        known = copy(self)
        known._solved, known._settled = dict(self._solved), None
        known.stats, known.stopped_by = self._solver.stats, StoppedBy.INTERRUPT
        return known


def _is_faster(one: Solution, other: Solution) -> bool:
    if one.time_per_sample_s is None or other.time_per_sample_s is None:
        return one.time_per_sample_s is not None
    return one.time_per_sample_s < other.time_per_sample_s * (1.0 - PROOF)


def _bounded(found: Solution, lower_s: float) -> Solution:
    """With another bound, and what both figures say."""
    value_s = found.time_per_sample_s
    if value_s is None:
        status = Status.INFEASIBLE if lower_s == float("inf") else Status.UNKNOWN
    else:
        lower_s = min(lower_s, value_s)
        status = Status.OPTIMAL if lower_s >= value_s * (1.0 - PROOF) else Status.FEASIBLE
    return replace(found, lower_bound_s=lower_s, status=status)


def _closed(devices: int, found: Solution, elapsed_s: float) -> PointClosed:
    value_s = float("inf") if found.time_per_sample_s is None else found.time_per_sample_s
    return PointClosed(False, devices, found.lower_bound_s, value_s, 1, elapsed_s)
