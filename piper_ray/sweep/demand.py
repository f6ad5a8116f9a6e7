"""What points will take, before they start: from forecasts of their lattices, one for each kind of point; and which
points go together in a batch, and how those of a lost one come again.

The queue knows no I/O and no clock: the driver tells what was finished and how long it took. Who solves a batch, and
what becomes of one that a worker took down with it, is the backend's matter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from piper_ray.engine.preview import forecast_solve
from piper_ray.model.schedule import CHUNKED
from piper_ray.model.solution import Forecast
from piper_ray.planners import planner_of
from piper_ray.planners.planner import NamedPlanner, Needs
from piper_ray.sweep.answer import KEPT_BYTES
from piper_ray.sweep.plan_point import PlanPoint
from piper_ray.sweep.point import AnyPoint, Point, Sweep, schedule_text

BATCH_S = 0.3
"""The work in a batch: a call costs 1 to 2 ms, and what is in work is lost when the driver is killed."""

BATCH_POINTS = 256
"""The most points of a batch."""


class PointKind(NamedTuple):
    """Points that are likely to take alike: they share a lattice."""

    workload: str
    planner: str
    tensor_parallelism: bool
    recompute: str
    schedule: str

    @classmethod
    def of(cls, point: Point) -> PointKind:
        allowed, schedule = point.restrictions, schedule_text(point.schedule.name.value, point.schedule.v)
        return cls(point.workload, point.planner, allowed.tensor_parallelism, allowed.recompute.value, schedule)


class PlanKind(NamedTuple):
    """Plans that are likely to take alike."""

    workload: str
    trained_by: str
    precision: str
    nodes: int


Kind = PointKind | PlanKind


def kind_of(point: AnyPoint) -> Kind:
    """Points of one kind are about one subject."""
    if isinstance(point, PlanPoint):
        return PlanKind(point.workload, point.trained_by, point.precision, point.nodes)
    return PointKind.of(point)


class PointQueue:
    """Hands out points kind by kind, in batches of ``BATCH_S`` by what the kind has taken so far."""

    def __init__(self, points: Iterable[AnyPoint]) -> None:
        self._waiting: dict[Kind, deque[AnyPoint]] = {}
        for point in points:
            self._waiting.setdefault(kind_of(point), deque()).append(point)
        self._again: deque[AnyPoint] = deque()
        self._mean_s: dict[Kind, float] = {}
        self._largest: dict[Kind, int] = {}
        self.left = sum(map(len, self._waiting.values()))
        """Points not yet handed out."""

    def next_kind(self) -> Kind | None:
        """The kind of the next batch; None when all is handed out."""
        if self._again:
            return kind_of(self._again[0])
        return next(iter(self._waiting), None)

    def next_points(self, workers: int) -> tuple[AnyPoint, ...]:
        """The next points of ``next_kind``, for one process. Towards the end the batches shrink, so that all workers
        end together."""
        if self._again:
            self.left -= 1
            return (self._again.popleft(),)
        kind = next(iter(self._waiting))
        queue = self._waiting[kind]
        count = min(self._size(kind), max(1, self.left // (2 * workers)), len(queue))
        points = tuple(queue.popleft() for _ in range(count))
        if not queue:
            del self._waiting[kind]
        self._largest[kind] = max(self._largest.get(kind, 1), count)
        self.left -= count
        return points

    def took(self, kind: Kind, points: int, seconds: float) -> None:
        """Points of a kind were solved in ``seconds`` of work. A slow one counts at once, quick ones gradually."""
        mean_s = seconds / points
        known_s = self._mean_s.get(kind, mean_s)
        self._mean_s[kind] = max(mean_s, 0.5 * (known_s + mean_s))

    def point_s(self, kind: Kind) -> float | None:
        """What a point of the kind takes; None before any is solved."""
        return self._mean_s.get(kind)

    def again(self, points: tuple[AnyPoint, ...]) -> None:
        """A batch that ended its worker: its points come again one by one, and before all others."""
        self._again.extend(points)
        self.left += len(points)

    def _size(self, kind: Kind) -> int:
        """A kind begins with single points, and batches grow no faster than twofold."""
        mean_s = self._mean_s.get(kind)
        if mean_s is None:
            return 1
        wanted = int(BATCH_S / max(mean_s, 1e-6))
        return max(1, min(wanted, 2 * self._largest.get(kind, 1), BATCH_POINTS))


_PROCESS_BYTES = 330e6
"""What a worker needs beyond what its planner's needs count for a process: Ray, and the interpreter's state for it."""

_SIZES_APART = 2.0
"""Points whose needs differ by no more are solved by workers of one size."""

_SMALL_BYTES = 1e9
"""Points that need less are solved by workers of one size, too: each machine has as much for each of its cores."""

_LONG_S = 60.0
_UNKNOWN_S = 1.0
_PLAN_S = 2.0
_PLAN_BYTES = 500e6
"""Bytes of a plan of a model with some hundred layers, and of its estimates."""


@dataclass(frozen=True)
class Demand:
    """What points need. lattices: the forecast of each kind's lattice, whoever plans, for its point of most devices.
    planners: the planners by name. Plans of models are taken to be alike."""

    lattices: Mapping[PointKind, Forecast]
    planners: Mapping[str, NamedPlanner]

    @classmethod
    def of(cls, sweep: Sweep) -> Demand:
        largest: dict[PointKind, Point] = {}
        points = [point for point in sweep.points if isinstance(point, Point)]
        for point in points:
            kind = _any_planner(point)
            if kind not in largest or point.devices > largest[kind].devices:
                largest[kind] = point
        found = {
            kind: forecast_solve(point.on(sweep.graph(point)), point.restrictions) for kind, point in largest.items()
        }
        return cls(found, {name: planner_of(name) for name in {point.planner for point in points}})

    def lattice(self, point: Point) -> Forecast:
        """What the exact planner would work on."""
        return self.lattices[_any_planner(point)]

    def memory_bytes(self, point: AnyPoint) -> float | None:
        """The memory of the process that solves a point; None if that cannot be known."""
        if isinstance(point, PlanPoint):
            return _PROCESS_BYTES + _PLAN_BYTES
        needs = self._needs(point)
        if needs is None:
            return None
        return _PROCESS_BYTES + KEPT_BYTES + needs.memory_bytes

    def by_memory(self, points: Iterable[AnyPoint]) -> list[tuple[float, list[AnyPoint]]]:
        """What workers should have, and whom they should solve; those of which that cannot be known are left out."""
        needs = {point: need for point in points if (need := self.memory_bytes(point)) is not None}
        groups: list[list[AnyPoint]] = []
        limit_bytes = -1.0
        for point in sorted(needs, key=needs.__getitem__):
            if needs[point] > limit_bytes:
                groups.append([])
                limit_bytes = max(_SMALL_BYTES, _SIZES_APART * needs[point])
            groups[-1].append(point)
        return [(needs[group[-1]], group) for group in groups]

    def seconds(self, point: AnyPoint) -> float:
        """A rough guess."""
        if isinstance(point, PlanPoint):
            return _PLAN_S
        needs = self._needs(point)
        return _UNKNOWN_S if needs is None else needs.seconds

    def long_points(self, points: Iterable[AnyPoint], workers: int) -> frozenset[AnyPoint]:
        """The points that the whole cluster should solve one after the other: long ones, and too few to keep it
        busy."""
        long = frozenset(point for point in points if isinstance(point, Point) and self._is_long(point))
        return long if len(long) < workers else frozenset()

    def _is_long(self, point: Point) -> bool:
        needs = self._needs(point)
        spreads = point.schedule.name not in CHUNKED  # whose searches no cluster shares yet
        return needs is not None and spreads and needs.can_spread and needs.seconds > _LONG_S

    def _needs(self, point: Point) -> Needs | None:
        """What a point's planner needs; None where its downsets cannot be counted."""
        lattice = self.lattice(point)
        if lattice.memory_bytes is None or lattice.downsets is None:
            return None
        return self.planners[point.planner].needs(lattice, point.devices, point.microbatches)


def _any_planner(point: Point) -> PointKind:
    return PointKind.of(point)._replace(planner="")
