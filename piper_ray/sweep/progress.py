"""What a sweep tells while it goes on, and at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from piper_ray.model.figures import PROOF_TOLERANCE
from piper_ray.model.options import EXACT
from piper_ray.sweep.point import Point, scene_name, schedule_text


@dataclass(frozen=True)
class Best:
    """The fastest plan so far of a workload under a schedule. Of ``alike`` points that are as fast, to what proofs
    leave, that on the fewest devices, then with the least memory, then of the exact planner.

    >>> from piper_ray import Restrictions
    >>> Best(Point("bert", "piper", 64, 512, 80e9, 25e9, Restrictions()), 0.0125).time_per_sample_s
    0.0125
    """

    point: Point
    time_per_sample_s: float
    alike: int = 1


@dataclass
class Progress:
    """How far a sweep is.

    points: of the sweep. recorded: before it started. done, and failed or infeasible among them: since then.

    solving_s: of all points, on their workers. run_s: since the first was handed out. start_s: what came before,
    reading and starting Ray. workers: at the moment. best: by workload and schedule, see
    ``point.scene_name``. errors: how many of each kind.

    >>> Progress(points=12, recorded=3, done=4).left
    5
    """

    points: int
    recorded: int
    done: int = 0
    infeasible: int = 0
    solving_s: float = 0.0
    run_s: float = 0.0
    start_s: float = 0.0
    workers: int = 0
    best: dict[str, Best] = field(default_factory=dict)
    latest_best: str | None = None
    errors: Counter[str] = field(default_factory=Counter)
    _fastest: dict[str, list[Best]] = field(default_factory=dict, init=False, repr=False)
    """Of each label all points that are as fast as the best."""

    @property
    def failed(self) -> int:
        """Points that ended in an error."""
        return self.errors.total()

    @property
    def left(self) -> int:
        """Points that are neither on record nor done in this run."""
        return self.points - self.recorded - self.done

    @property
    def eta_s(self) -> float | None:
        """By the pace so far; None before there is any."""
        return self.run_s / self.done * self.left if self.done else None

    def begin(self, start_s: float) -> None:
        """The first points are handed out. start_s: what came before."""
        self.start_s = start_s

    def advance(self, run_s: float, workers: int) -> None:
        """As it stands now."""
        self.run_s, self.workers = run_s, workers

    def note(self, point: Point, row: Mapping[str, object]) -> None:
        """A point is finished."""
        self.done += 1
        if row["status"] == "error":
            self.errors[str(row["error_kind"])] += 1
        self.infeasible += row["status"] == "infeasible"
        self.solving_s += float(str(row["seconds"]))
        found_s = row.get("time_per_sample_s")
        label = scene_name(point.workload, schedule_text(point.schedule.name.value, point.schedule.v))
        if isinstance(found_s, float):
            self._rank(label, Best(point, found_s))

    def _rank(self, label: str, found: Best) -> None:
        """In whatever order points are done, the best is the same."""
        known = [*self._fastest.get(label, ()), found]
        limit_s = min(one.time_per_sample_s for one in known) * (1.0 + PROOF_TOLERANCE)
        self._fastest[label] = fastest = [one for one in known if one.time_per_sample_s <= limit_s]
        best = replace(min(fastest, key=_order), alike=len(fastest))
        if best != self.best.get(label):
            self.best[label] = best
            self.latest_best = label


def _order(best: Best) -> tuple[object, ...]:
    """The first is the best of equally fast ones."""
    point = best.point
    of_cluster = point.devices, point.memory_bytes, point.planner != EXACT, point.planner, point.microbatches
    return *of_cluster, point.bandwidth_bytes_per_s, repr(point.restrictions)


SweepListener = Callable[[Progress], None]
