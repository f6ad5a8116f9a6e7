"""Optima along the number of devices, as they are asked for: whatever the schedule, and however they were found."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import pairwise

from piper_ray.engine.frontier.points import FrontierPoint, FrontierStats
from piper_ray.engine.frontier.ranges import parse_numbers
from piper_ray.model import arguments
from piper_ray.model.errors import UsageError
from piper_ray.model.figures import percent_text, plural, time_text
from piper_ray.model.instance import Instance
from piper_ray.model.notebook import html_table
from piper_ray.model.options import SolveOptions
from piper_ray.model.plan import Plan
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import Schedule
from piper_ray.model.solution import Solution, Status
from piper_ray.model.stop import StoppedBy

Numbers = Iterable[int] | str
"""Rising, or a text such as "8..64" or "8,16,32"."""


class Frontier(ABC):
    """Optima along the number of devices, and under Piper's schedule along the bound on the sum of data-parallel
    degrees at all of them.

    instance: at the most devices asked for. schedule: what values and bounds are of. stopped_by: what ended a search
    early, if anything did: then what is not proved has a gap. reason: why there is no plan at all, where that is known
    beforehand. chunks_differ: the number of chunks on each rank is each solution's own. by_solves: ``stats`` counts
    solves, and not evaluations of a threshold.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> frontier = piper_ray.frontier(bert, devices="1..8", threads=1)
    >>> [point.devices for point in frontier.points() if point.is_step]
    [1, 2, 3, 4, 5, 6, 7, 8]
    """

    by_solves = False

    def __init__(
        self, instance: Instance, restrictions: Restrictions, options: SolveOptions, schedule: Schedule
    ) -> None:
        self.instance, self.restrictions, self.options, self.schedule = instance, restrictions, options, schedule
        self.stats = FrontierStats()
        self.stopped_by: StoppedBy | None = None
        self.reason: str | None = None
        self.chunks_differ = False

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

    @abstractmethod
    def points(self) -> tuple[FrontierPoint, ...]:
        """By rising number of devices."""

    @abstractmethod
    def budget_points(self, budgets: Numbers | None = None) -> tuple[FrontierPoint, ...]:
        """By rising bound on the sum of data-parallel degrees. Raises UsageError for bounds above min(N, K), and where
        one d is the same for all stages."""

    def by_devices(self) -> dict[int, float | None]:
        """{K: least time per sample in s}; None where no plan fits, or none is known."""
        return {point.devices: point.time_per_sample_s for point in self.points()}

    def by_budget(self, budgets: Numbers | None = None) -> dict[int, float | None]:
        """{bound on the sum of data-parallel degrees: least time per sample in s} on all devices of the instance.

        budgets: rising, or a text such as "8..64"; every bound up to min(N, K) if not given. Found at the first call.
        """
        return {point.data_parallel_budget: point.time_per_sample_s for point in self.budget_points(budgets)}

    def plan(self, devices: int) -> Plan | None:
        """The plan that ``solve`` gives on so many devices: least time, then fewest devices, then fewest stages.

        None where no plan is known. Raises UsageError for a number of devices that was not asked for.
        """
        return self._plan_at(self._asked_for(devices))

    def solution(self, devices: int) -> Solution:
        """What ``solve`` gives on so many devices: ``plan``, its time and bound; the stats are the frontier's.

        Raises UsageError as ``plan``.
        """
        return self._solution_at(self._asked_for(devices))

    @abstractmethod
    def _plan_at(self, devices: int) -> Plan | None: ...

    @abstractmethod
    def _solution_at(self, devices: int) -> Solution: ...

    @property
    @abstractmethod
    def _positions(self) -> Sequence[int]:
        """The numbers of devices asked for."""

    def _asked_for(self, devices: object) -> int:
        wanted = arguments.whole(devices)
        if wanted is None:
            raise UsageError(f"devices must be a whole number, not {arguments.shown(devices)}")
        if wanted not in self._positions:
            raise UsageError(f"the frontier was not asked for {wanted} devices")
        return wanted


def rising(numbers: Numbers, name: str, what: str) -> tuple[int, ...]:
    """Raises UsageError unless there are some, positive and strictly rising; a text is read as on the command line."""
    if isinstance(numbers, str):
        return parse_numbers(numbers, name)
    found = arguments.whole_numbers(name, numbers)
    if not found:
        raise UsageError(f"expected {what} at least")
    if found[0] < 1 or any(later <= earlier for earlier, later in pairwise(found)):
        raise UsageError(f"{what} must be 1 or more and above the one before it, not {found[0]}, ...")
    return found
