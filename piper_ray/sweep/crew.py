"""Who solves points: what the driver asks of them, and the one that is this very process."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, final

from piper_ray.model.options import SolveOptions
from piper_ray.model.stop import Stop
from piper_ray.sweep.answer import Row, answer
from piper_ray.sweep.lattices import Lattices
from piper_ray.sweep.point import Point, Sweep
from piper_ray.sweep.queue import PointBatch, PointKind, PointTask


class Reply(NamedTuple):
    """rows: of the batch's tasks, in order; None if it ends its workers, ``lost`` saying how. seconds: of its work.

    attempts: workers that have had it.
    """

    batch: PointBatch
    rows: tuple[Row, ...] | None
    seconds: float
    attempts: int = 1
    lost: str = ""


class Crew(Protocol):
    """Solves batches in any order."""

    @property
    def workers(self) -> int:
        """How many batches are worked on at a time."""
        ...

    @property
    def in_flight(self) -> int:
        """Batches that are not yet answered."""
        ...

    @property
    def wants_more(self) -> bool:
        """Whether somebody is free, or will be before the next batch is at hand."""
        ...

    def expect(self, kind: PointKind, point_s: float) -> None:
        """What a point of the kind takes, now that some are solved."""
        ...

    def holds(self, memory_bytes: float) -> bool:
        """Whether some worker has so much memory."""
        ...

    def submit(self, batch: PointBatch) -> None: ...

    def replies(self, timeout_s: float) -> list[Reply]:
        """Those that have come, or come within the time. Raises ClusterError if nothing more can come."""
        ...

    def solve_together(self, point: Point) -> Row:
        """All of the crew for one point; nothing else may be in flight."""
        ...

    def close(self) -> None:
        """What is in flight is given up."""
        ...


@final
class Here:
    """This process: for sweeps of a few seconds, which starting Ray would double."""

    def __init__(self, sweep: Sweep, stop: Stop[Any]) -> None:
        self._sweep = sweep
        self._stop = stop
        self._lattices = Lattices()
        self._batches: deque[PointBatch] = deque()

    workers = 1

    @property
    def in_flight(self) -> int:
        return len(self._batches)

    @property
    def wants_more(self) -> bool:
        return not self._batches

    def expect(self, kind: PointKind, point_s: float) -> None:
        """It is done when it is done."""

    def holds(self, memory_bytes: float) -> bool:  # noqa: ARG002
        """The solver itself refuses what does not fit into the machine."""
        return True

    def submit(self, batch: PointBatch) -> None:
        self._batches.append(batch)

    def replies(self, timeout_s: float) -> list[Reply]:  # noqa: ARG002 - the work is done meanwhile
        """One point: each is on record before the next begins to take time."""
        batch = self._batches.popleft()
        if len(batch.tasks) > 1:
            self._batches.appendleft(replace(batch, tasks=batch.tasks[1:]))
        first: tuple[PointTask, ...] = batch.tasks[:1]
        point = first[0].point
        row = answer(point, self._sweep.graphs[point.workload], self._sweep.options, self._lattices, stop=self._stop)
        return [Reply(replace(batch, tasks=first), (row,), float(str(row["seconds"])))]

    def solve_together(self, point: Point) -> Row:
        options = SolveOptions(gap=self._sweep.options.gap, time_limit_s=self._sweep.options.time_limit_s)
        return answer(point, self._sweep.graphs[point.workload], options, self._lattices, stop=self._stop)

    def close(self) -> None:
        self._batches.clear()
