"""What a sweep tells while it goes on, and at its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from piper_ray.sweep.point import Point


@dataclass(frozen=True)
class Best:
    """The fastest plan so far of a workload."""

    point: Point
    time_per_sample_s: float


@dataclass
class Progress:
    """Points: all of the sweep; recorded before it started; done (failed among them) since then, left.

    worked_s: of all workers together, on points. run_s: since the first point was handed out. workers: at the moment.
    spread: points that the whole cluster solves. started_s: what came before, starting Ray above all.
    """

    points: int
    recorded: int
    done: int = 0
    failed: int = 0
    infeasible: int = 0
    worked_s: float = 0.0
    solving_s: float = 0.0
    run_s: float = 0.0
    start_s: float = 0.0
    workers: int = 0
    best: dict[str, Best] = field(default_factory=dict)

    @property
    def left(self) -> int:
        return self.points - self.recorded - self.done

    @property
    def eta_s(self) -> float | None:
        """By the pace so far; None before there is any."""
        return self.run_s / self.done * self.left if self.done else None

    def note(self, point: Point, row: Mapping[str, object]) -> None:
        """A point is finished."""
        self.done += 1
        self.failed += row["status"] == "error"
        self.infeasible += row["status"] == "infeasible"
        self.solving_s += float(str(row["seconds"]))
        found_s = row.get("time_per_sample_s")
        best = self.best.get(point.workload)
        if isinstance(found_s, float) and (best is None or found_s < best.time_per_sample_s):
            self.best[point.workload] = Best(point, found_s)


Listener = Callable[[Progress], None]
