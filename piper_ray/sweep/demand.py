"""What points will take, before they start: from forecasts, one for each kind of point."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from piper_ray.engine.solve import forecast_solve
from piper_ray.model.solution import Forecast
from piper_ray.planners.pipedream.states import PAIR_LIMIT
from piper_ray.planners.published.paper_table import DEFAULT_TABLE_LIMIT_BYTES
from piper_ray.sweep.lattices import KEPT_BYTES
from piper_ray.sweep.point import Point, Sweep
from piper_ray.sweep.schedule import Kind
from piper_ray.sweep.schema import PIPER

_PROCESS_BYTES = 330e6
"""Of a worker over what a forecast counts for a process: Ray, and the interpreter's state for it."""

_QUANTUM_BYTES = 64e6
"""Demands are rounded up, so that tasks of many sizes can take one another's place."""

_LONG_S = 60.0

_LEAST_BYTES = 170e6  # of a process without any lattice
_PAIR_BYTES = 32


@dataclass(frozen=True)
class Demand:
    """By kind, as of its point of most devices."""

    forecasts: Mapping[Kind, Forecast]

    @classmethod
    def of(cls, sweep: Sweep) -> Demand:
        largest: dict[Kind, Point] = {}
        for point in sweep.points:
            kind = Kind.of(point)
            if kind not in largest or point.devices > largest[kind].devices:
                largest[kind] = point
        known: dict[Kind, Forecast] = {}
        for kind, point in largest.items():
            alike = kind._replace(planner=PIPER)
            if alike not in known:
                known[alike] = forecast_solve(point.on(sweep.graphs[point.workload]), point.restrictions)
            known[kind] = known[alike]
        return cls(known)

    def memory_bytes(self, point: Point) -> float | None:
        """Of the process that solves it; None if that cannot be known."""
        forecast = self.forecasts[Kind.of(point)]
        if forecast.memory_bytes is None or forecast.downsets is None:
            return None
        need = _PROCESS_BYTES + KEPT_BYTES + (forecast.memory_bytes if point.planner == PIPER else _LEAST_BYTES)
        if point.planner == "piper-published":
            row_bytes = 8 * (point.devices + 1) * (min(point.devices, point.microbatches) + 1)
            need += min(float(row_bytes * forecast.downsets), DEFAULT_TABLE_LIMIT_BYTES)
        elif point.planner == "pipedream":
            need += _PAIR_BYTES * min(forecast.pairs or PAIR_LIMIT, PAIR_LIMIT)
        return -(-need // _QUANTUM_BYTES) * _QUANTUM_BYTES

    def seconds(self, point: Point) -> float:
        """A rough guess."""
        seconds = self.forecasts[Kind.of(point)].seconds
        return 1.0 if seconds is None else seconds if point.planner == PIPER else 0.01

    def long_points(self, points: tuple[Point, ...], workers: int) -> frozenset[Point]:
        """Those that the whole cluster should solve one after the other: long, and too few to keep it busy."""
        long = frozenset(p for p in points if p.planner == PIPER and self.seconds(p) > _LONG_S)
        return long if len(long) < workers else frozenset()
