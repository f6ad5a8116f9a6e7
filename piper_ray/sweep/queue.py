"""Which points go together in a batch, and how those of a lost one come again.

No I/O and no clock: the driver tells what was finished and how long it took. Who solves a batch, and what becomes of
one that a worker took down with it, is the backend's matter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from piper_ray.sweep.point import Point, schedule_text

BATCH_S = 0.3
"""Of work in a batch: a call costs 1 to 2 ms, and what is in work is lost when the driver is killed."""

BATCH_POINTS = 256
"""At most."""


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


class PointQueue:
    """Hands out points kind by kind, in batches of ``BATCH_S`` by what the kind has taken so far."""

    def __init__(self, points: Iterable[Point]) -> None:
        self._waiting: dict[PointKind, deque[Point]] = {}
        for point in points:
            self._waiting.setdefault(PointKind.of(point), deque()).append(point)
        self._again: deque[Point] = deque()
        self._mean_s: dict[PointKind, float] = {}
        self._largest: dict[PointKind, int] = {}
        self.left = sum(map(len, self._waiting.values()))
        """Points not yet handed out."""

    def next_kind(self) -> PointKind | None:
        """Of the next batch; None when all is handed out."""
        if self._again:
            return PointKind.of(self._again[0])
        return next(iter(self._waiting), None)

    def next_points(self, workers: int) -> tuple[Point, ...]:
        """Of ``next_kind``, for one process. Towards the end the batches shrink, so that all workers end together."""
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

    def took(self, kind: PointKind, points: int, seconds: float) -> None:
        """Points of a kind were solved in so many seconds of work. A slow one counts at once, quick ones by and by."""
        mean_s = seconds / points
        known_s = self._mean_s.get(kind, mean_s)
        self._mean_s[kind] = max(mean_s, 0.5 * (known_s + mean_s))

    def point_s(self, kind: PointKind) -> float | None:
        """What a point of the kind takes; None before any is solved."""
        return self._mean_s.get(kind)

    def again(self, points: tuple[Point, ...]) -> None:
        """A batch that ended its worker: its points come again one by one, and before all others."""
        self._again.extend(points)
        self.left += len(points)

    def _size(self, kind: PointKind) -> int:
        """A kind begins with single points, and batches grow no faster than twofold."""
        mean_s = self._mean_s.get(kind)
        if mean_s is None:
            return 1
        wanted = int(BATCH_S / max(mean_s, 1e-6))
        return max(1, min(wanted, 2 * self._largest.get(kind, 1), BATCH_POINTS))
