"""What points will take, before they start: from forecasts of their lattices, one for each kind of point."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from piper_ray.engine.preview import forecast_solve
from piper_ray.model.schedule import CHUNKED
from piper_ray.model.solution import Forecast
from piper_ray.planners import planner_of
from piper_ray.planners.planner import NamedPlanner, Needs
from piper_ray.sweep.lattices import KEPT_BYTES
from piper_ray.sweep.point import Point, Sweep
from piper_ray.sweep.queue import PointKind

_PROCESS_BYTES = 330e6
"""Of a worker over what its planner's needs count for a process: Ray, and the interpreter's state for it."""

_SIZES_APART = 2.0
"""Points whose needs differ by no more are solved by workers of one size."""

_SMALL_BYTES = 1e9
"""So do those that need less: each machine has as much for each of its cores."""

_LONG_S = 60.0
_UNKNOWN_S = 1.0


@dataclass(frozen=True)
class Demand:
    """lattices: by kind, whoever plans; as of its point of most devices. planners: by name."""

    lattices: Mapping[PointKind, Forecast]
    planners: Mapping[str, NamedPlanner]

    @classmethod
    def of(cls, sweep: Sweep) -> Demand:
        largest: dict[PointKind, Point] = {}
        for point in sweep.points:
            kind = _any_planner(point)
            if kind not in largest or point.devices > largest[kind].devices:
                largest[kind] = point
        found = {
            kind: forecast_solve(point.on(sweep.graphs[point.workload]), point.restrictions)
            for kind, point in largest.items()
        }
        return cls(found, {name: planner_of(name) for name in {point.planner for point in sweep.points}})

    def lattice(self, point: Point) -> Forecast:
        """What the exact planner would work on."""
        return self.lattices[_any_planner(point)]

    def memory_bytes(self, point: Point) -> float | None:
        """Of the process that solves it; None if that cannot be known."""
        needs = self._needs(point)
        if needs is None:
            return None
        return _PROCESS_BYTES + KEPT_BYTES + needs.memory_bytes

    def by_memory(self, points: Iterable[Point]) -> list[tuple[float, list[Point]]]:
        """What workers should have, and whom they should solve; those of which that cannot be known are left out."""
        needs = {point: need for point in points if (need := self.memory_bytes(point)) is not None}
        groups: list[list[Point]] = []
        limit_bytes = -1.0
        for point in sorted(needs, key=needs.__getitem__):
            if needs[point] > limit_bytes:
                groups.append([])
                limit_bytes = max(_SMALL_BYTES, _SIZES_APART * needs[point])
            groups[-1].append(point)
        return [(needs[group[-1]], group) for group in groups]

    def seconds(self, point: Point) -> float:
        """A rough guess."""
        needs = self._needs(point)
        return _UNKNOWN_S if needs is None else needs.seconds

    def long_points(self, points: Iterable[Point], workers: int) -> frozenset[Point]:
        """Those that the whole cluster should solve one after the other: long, and too few to keep it busy."""
        long = frozenset(point for point in points if self._is_long(point))
        return long if len(long) < workers else frozenset()

    def _is_long(self, point: Point) -> bool:
        needs = self._needs(point)
        spreads = point.schedule.name not in CHUNKED  # whose searches no cluster shares yet
        return needs is not None and spreads and needs.can_spread and needs.seconds > _LONG_S

    def _needs(self, point: Point) -> Needs | None:
        """None where its downsets cannot be counted."""
        lattice = self.lattice(point)
        if lattice.memory_bytes is None or lattice.downsets is None:
            return None
        return self.planners[point.planner].needs(lattice, point.devices, point.microbatches)


def _any_planner(point: Point) -> PointKind:
    return PointKind.of(point)._replace(planner="")
